"""What the logprobs of drawn tokens are made of, as --logprobs-mode says for a whole server."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.step import SampleInput


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """is_processed: of the logits that a token was drawn from, changed as its request asks.

    is_logits: the logits themselves, instead of their log-probabilities. Those of prompts are never
    processed, since nothing is drawn there.
    """

    is_processed: bool = False
    is_logits: bool = False

    @classmethod
    def named(cls, name: str) -> LogprobsMode:
        """The mode that the flag calls so: `raw_logprobs`, `processed_logits`, and the others."""
        return cls(name.startswith("processed_"), name.endswith("_logits"))

    def changes(self, item: SampleInput, vocab_size: int) -> bool:
        """Whether the logits (V) that are told can differ from those of the model."""
        if not self.is_processed:
            return False
        params = item.params
        is_plain = params.temperature == 1 and not params.has_filters(vocab_size)
        return item.changes_logits or not (params.is_greedy or is_plain)


RAW_LOGPROBS = LogprobsMode()
