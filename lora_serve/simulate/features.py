"""What a step's time is modelled from: a few numbers that `SchedulerOutput` says."""

from __future__ import annotations

import msgspec

from lora_serve.identity import BASE_MODEL, AdapterRef
from lora_serve.step import SchedulerOutput


class StepFeatures(msgspec.Struct, frozen=True):
    """How much there is of each thing in one step, or, in a cost model, the seconds of one of it.

    steps: 1. decode_tokens: of chunks of one token; decode_context: the positions they see.
    prefill_tokens: of longer chunks; prefill_context: the positions that each of these tokens
    sees, summed. prompts: longer chunks that end their prompt, and so draw a token.
    adapters: different ones in the step; adapter_tokens: the tokens that they act on.
    new_adapters: those that the step adds to the workers' memory.
    """

    steps: float = 0.0
    decode_tokens: float = 0.0
    decode_context: float = 0.0
    prefill_tokens: float = 0.0
    prefill_context: float = 0.0
    prompts: float = 0.0
    adapters: float = 0.0
    adapter_tokens: float = 0.0
    new_adapters: float = 0.0

    def dot(self, other: StepFeatures) -> float:
        """The sum of the products: seconds, if one of the two has seconds."""
        return sum(a * b for a, b in zip(self.values, other.values, strict=True))

    def plus(self, other: StepFeatures) -> StepFeatures:
        return StepFeatures(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def kind(self) -> str:
        """Which of KINDS the step is."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_tokens else "prefill"

    @property
    def values(self) -> tuple[float, ...]:
        return msgspec.structs.astuple(self)


KINDS = ("decode", "prefill", "mixed")


def step_features(step: SchedulerOutput) -> StepFeatures:
    decode_tokens = decode_context = prefill_tokens = prompts = adapter_tokens = 0
    prefill_context = 0.0
    adapters: set[AdapterRef] = set()
    for chunk in step.requests:
        num_tokens = chunk.num_tokens
        if num_tokens == 1:
            decode_tokens += 1
            decode_context += chunk.start + 1
        else:
            prefill_tokens += num_tokens
            prefill_context += num_tokens * (chunk.start + (num_tokens + 1) / 2)
            prompts += bool(chunk.asked.samples)
        if chunk.adapter is not BASE_MODEL:
            adapters.add(chunk.adapter)
            adapter_tokens += num_tokens
    return StepFeatures(
        steps=1,
        decode_tokens=decode_tokens,
        decode_context=decode_context,
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_context,
        prompts=prompts,
        adapters=len(adapters),
        adapter_tokens=adapter_tokens,
        new_adapters=len(step.add_adapters),
    )
