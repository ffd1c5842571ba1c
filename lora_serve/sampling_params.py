"""How the next token is chosen, as the user asked for it. Checked once, at the API's edge."""

from __future__ import annotations

from array import array
from functools import cached_property

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_outputs import StructuredOutput

# What a request may make every step compute for it, which all others wait for.
MAX_STOP_STRINGS = 16  # OpenAI allows 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_N = 128
GREEDY_EPSILON = 1e-5  # a temperature below this is greedy, as in vLLM


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One request's choices. `verify` refuses what makes no sense and names the field.

    What every step asks of them is made once and kept.

    seed: None means "draw one at admission"; the engine stores what it drew, so that a preempted
        request draws the same tokens again.
    top_k: 0 or -1 is off. logprobs: None is off, else how many alternatives besides the sampled.
    structured_outputs: what the answer must match; None for any answer.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutput | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @cached_property
    def stop_token_id_set(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids)

    @cached_property
    def biased_token_ids(self) -> array[int]:
        """The keys of logit_bias, as int64."""
        return array("q", self.logit_bias)

    @cached_property
    def biases(self) -> array[float]:
        """The values of logit_bias, rounded to float32."""
        return array("f", self.logit_bias.values())

    def verify(self, max_logprobs: int, vocab_size: int) -> None:
        """Raise InvalidRequestError for the first field that is out of its range."""
        self._verify_counts(max_logprobs)
        _require_range("temperature", self.temperature, 0.0, 2.0)
        _require_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.seed is not None:
            _require_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.structured_outputs is not None:
            self.structured_outputs.verify()
        self._verify_tokens(vocab_size)

    def _verify_counts(self, max_logprobs: int) -> None:
        _require_range("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _require_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; "
                    "lower it or raise max_tokens",
                    "min_tokens",
                )
        _require_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _require_range("top_k", self.top_k, -1, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require_range(name, value, 0, max_logprobs)
        self._verify_stop_strings()

    def _verify_stop_strings(self) -> None:
        _require_at_most(MAX_STOP_STRINGS, "stop", len(self.stop), "strings")
        if "" in self.stop:
            raise InvalidRequestError("stop must not contain an empty string", "stop")
        longest = max(map(len, self.stop), default=0)
        _require_at_most(MAX_STOP_STRING_CHARS, "stop", longest, "characters in one string")

    def _verify_tokens(self, vocab_size: int) -> None:
        _require_at_most(
            MAX_STOP_TOKEN_IDS, "stop_token_ids", len(set(self.stop_token_ids)), "different ids"
        )
        _require_at_most(MAX_LOGIT_BIASES, "logit_bias", len(self.logit_bias), "tokens")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}, which is out of vocabulary: the model "
                        f"has {vocab_size} tokens",
                        name,
                    )
        for bias in self.logit_bias.values():
            _require_range("logit_bias", bias, -100.0, 100.0)


def _require_at_most(limit: int, name: str, count: int, what: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} has {count} {what}, at most {limit} are allowed", name)


def _require_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    inside = low <= value <= high and not (open_low and value == low)  # False for NaN
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low}, {high}], got {value}", name)
