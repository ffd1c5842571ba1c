"""How the next token is chosen, as the user asked for it. Checked once, at the API's edge."""

from __future__ import annotations

from array import array
from functools import cached_property

import msgspec

from lora_serve.bitmask import bitmask_of
from lora_serve.errors import InvalidRequestError
from lora_serve.structured_outputs import ReasoningTokens, StructuredOutput

# What a request may make every step compute for it, which all others wait for.
MAX_STOP_STRINGS = 16  # OpenAI allows 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_BAD_WORDS = 128  # as in vLLM
MAX_BAD_WORD_CHARS = 4096  # of all together
GREEDY_EPSILON = 1e-5  # a temperature below this is greedy, as in vLLM


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One request's choices. `verify` refuses what makes no sense and names the field.

    What every step asks of them is made once and kept.

    seed: None means "draw one at admission"; the engine stores what it drew, so that a preempted
        request draws the same tokens again.
    top_k: 0 or -1 is off. logprobs: None is off, else how many alternatives besides the sampled,
        -1 for the whole vocabulary.
    logprob_token_ids: the alternatives that logprobs are told of, instead of the most likely,
        however many logprobs asks for.
    prompt_logprob_start: the first prompt position that is scored, by predicting the token behind
        it. What stands before it may come from the cache. prompt_logprobs_last_n: the same, counted
        from the prompt's end: only so many of its last tokens; the engine stores the start.
    allowed_token_ids: the only tokens that are drawn; None for all. bad_words: what the answer must
        not hold, as tokens: the last of a word's is not drawn behind the others. The engine stores
        both in another form (`messages.TokenRules`).
    structured_outputs: what the answer must match; None for any answer.
    reasoning: what the answer may begin with before it must match; None if it must from its first
        token.
    thinking_token_budget: the most tokens of the reasoning, which `reasoning` must mark; then the
        token that ends it is drawn. None for any number.
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
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    prompt_logprobs_last_n: int | None = None
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutput | None = None
    reasoning: ReasoningTokens | None = None
    thinking_token_budget: int | None = None

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @cached_property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def has_filters(self, vocab_size: int) -> bool:
        """Whether draws of so many tokens leave some out for what the others weigh."""
        return 0 < self.top_k < vocab_size or self.min_p > 0 or self.top_p < 1

    def needs_reasoning(self, *, grammars_wait: bool) -> bool:
        """Whether it matters where reasoning begins and ends: to a grammar that waits, or a budget.

        A grammar that does not wait holds the whole answer, which then has no reasoning.
        """
        if self.structured_outputs is not None:
            return grammars_wait
        return self.thinking_token_budget is not None

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

    @cached_property
    def allowed_bitmask(self) -> bytes | None:
        """The mask of allowed_token_ids, in range."""
        if self.allowed_token_ids is None:
            return None
        return bitmask_of(self.allowed_token_ids, max(self.allowed_token_ids) + 1)

    @cached_property
    def _bounds_of_allowed(self) -> tuple[int, int]:
        ids = self.allowed_token_ids or (0,)
        return min(ids), max(ids)

    def with_num_logprobs(self, vocab_size: int) -> SamplingParams:
        """These params with as many logprobs as -1, or logprob_token_ids, ask for."""
        counts = (self.logprobs, self.prompt_logprobs)
        if self.logprob_token_ids:
            counts = (len(self.logprob_token_ids), self.prompt_logprobs)
        if -1 not in counts and counts[0] == self.logprobs:
            return self
        logprobs, prompt_logprobs = (vocab_size if count == -1 else count for count in counts)
        return msgspec.structs.replace(self, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def with_end(self, max_tokens: int | None, reasoning: ReasoningTokens | None) -> SamplingParams:
        """These params with another end; what was made of the other fields is kept.

        To be called on what has been verified.
        """
        if (max_tokens, reasoning) == (self.max_tokens, self.reasoning):
            return self
        made = msgspec.structs.replace(self, max_tokens=max_tokens, reasoning=reasoning)
        if self.allowed_bitmask is not None:
            made.__dict__.update(self.__dict__)
        return made

    def verify(self, max_logprobs: int, vocab_size: int, max_n: int) -> None:
        """Raise InvalidRequestError for the first field that is out of its range."""
        self._verify_counts(max_n)
        counted = (
            ("prompt_logprobs",) if self.logprob_token_ids else ("logprobs", "prompt_logprobs")
        )
        for name in counted:
            verify_num_logprobs(name, getattr(self, name), max_logprobs, vocab_size)
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
        if self.reasoning is not None:
            for token_id in (self.reasoning.start, self.reasoning.end):
                _require_range("reasoning", token_id, 0, vocab_size - 1)
        if self.thinking_token_budget is not None:
            _require_range("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        self._verify_tokens(vocab_size)

    def _verify_counts(self, max_n: int) -> None:
        if self.n > max_n:
            raise InvalidRequestError(
                f"n {self.n} is above --max-n {max_n}; ask for fewer choices, or raise the limit",
                "n",
            )
        _require_range("n", self.n, 1, max_n)
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
        self._verify_scored_part()
        self._verify_stop_strings()

    def _verify_scored_part(self) -> None:
        start, last_n = self.prompt_logprob_start, self.prompt_logprobs_last_n
        _require_range("prompt_logprob_start", start, 0, 2**31 - 1)
        if last_n is not None:
            _require_range("prompt_logprobs_last_n", last_n, 0, 2**31 - 1)
        if start and last_n is not None:
            raise InvalidRequestError(
                f"prompt_logprob_start {start} and prompt_logprobs_last_n {last_n} exclude each "
                "other; give one of them",
                "prompt_logprobs_last_n",
            )
        if self.prompt_logprobs is None and (start or last_n is not None):
            name = "prompt_logprobs_last_n" if last_n is not None else "prompt_logprob_start"
            raise InvalidRequestError(
                f"{name} needs prompt_logprobs: it says which of them; give both or leave it out",
                name,
            )

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
        self._verify_logprob_tokens()
        self._verify_allowed(vocab_size)
        self._verify_bad_words()
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self._bounds_of_allowed),
            ("logprob_token_ids", self.logprob_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}, which is out of vocabulary: the model "
                        f"has {vocab_size} tokens",
                        name,
                    )
        for bias in self.logit_bias.values():
            _require_range("logit_bias", bias, -100.0, 100.0)

    def _verify_logprob_tokens(self) -> None:
        count = len(self.logprob_token_ids)
        _require_at_most(MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids", count, "ids")

    def _verify_allowed(self, vocab_size: int) -> None:
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so nothing could be drawn; name a token, or leave it "
                "out to allow all",
                "allowed_token_ids",
            )
        _require_at_most(vocab_size, "allowed_token_ids", len(self.allowed_token_ids), "ids")

    def _verify_bad_words(self) -> None:
        _require_at_most(MAX_BAD_WORDS, "bad_words", len(self.bad_words), "strings")
        num_chars = sum(map(len, self.bad_words))
        _require_at_most(MAX_BAD_WORD_CHARS, "bad_words", num_chars, "characters in all")
        if "" in self.bad_words:
            raise InvalidRequestError("bad_words must not contain an empty string", "bad_words")


PROMPT_ONLY = SamplingParams(max_tokens=0)  # of a request that only wants its prompt computed


def verify_num_logprobs(name: str, count: int | None, max_logprobs: int, vocab_size: int) -> None:
    """Raise InvalidRequestError for more than --max-logprobs alternatives.

    count: None for no logprobs, -1 for the whole vocabulary. max_logprobs: -1 bounds nothing.
    """
    if count == -1 and -1 < max_logprobs < vocab_size:
        raise InvalidRequestError(
            f"{name} must be in [0, {max_logprobs}], got -1, the whole vocabulary of {vocab_size} "
            "tokens; ask for fewer, or serve with --max-logprobs -1",
            name,
        )
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    if count is not None and count != -1 and not 0 <= count <= limit:
        or_all = ", or -1 for the whole vocabulary" if limit >= vocab_size else ""
        raise InvalidRequestError(f"{name} must be in [0, {limit}]{or_all}, got {count}", name)


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
