"""What tests ask of a chunk's rows."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.step import AskedOutputs, PromptScoring, SampleInput


def sampling(*samples: SampleInput) -> AskedOutputs:
    return AskedOutputs(samples)


def scoring(target_ids: Sequence[int], num_top: int = 0, *samples: SampleInput) -> AskedOutputs:
    """Prompt logprobs, and tokens of the last rows."""
    return AskedOutputs(samples, PromptScoring(target_ids, num_top))
