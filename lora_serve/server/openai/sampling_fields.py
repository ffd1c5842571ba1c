"""Fields of bodies that say how the next tokens are chosen: listed here for every API.

They have the names of `SamplingParams`' fields, which says what each means. `parameters.py` brings
one to the other.
"""

from __future__ import annotations

from pydantic import Field

from lora_serve.server.openai.constraints import StructuredOutputs
from lora_serve.server.openai.fields import (
    Body,
    Ignored,
    Integer,
    LogitBias,
    Texts,
    ThinkingTokenBudget,
    Tokens,
    Unsupported,
    UnsupportedCount,
)


class SamplingFields(Body):
    """How one answer's tokens are chosen and shown, without how many, and of which logprobs."""

    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = None
    stop: Texts = ()
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: Tokens | None = None
    bad_words: Texts = ()
    logprob_token_ids: Tokens | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs = None
    thinking_token_budget: ThinkingTokenBudget = None

    spaces_between_special_tokens: Ignored = None

    repetition_detection: Unsupported = None
    watermarking: Unsupported = None
    routed_experts_prompt_start: UnsupportedCount = None


class GenerationFields(SamplingFields):
    """The same with how many answers and tokens there are, and what is told of the prompt."""

    n: Integer | None = None
    max_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None
    prompt_logprob_start: Integer | None = None
    prompt_logprobs_last_n: Integer | None = None
