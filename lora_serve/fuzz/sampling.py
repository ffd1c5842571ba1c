"""Draws how requests choose their tokens: all sampling parameters, and grammars."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from lora_serve.fuzz.grammars import CONSTRAINTS, TAGS
from lora_serve.fuzz.prompts import RESERVED_TOKENS, token_ids
from lora_serve.fuzz.trace import Embeds, Prompt, Tokens
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

STOPS = (("e",), (" the", "\n"), ("er", "A", "zz"))
BAD_WORDS = (("e",), ("the keeper", "letter", "a"), ("er", "of the", "once more"))
ANSWER_LENGTHS = (1, 2, 12, 48, 96, 96)
TAGS_SHARE = 0.25  # of the requests with a grammar


class ParamsWriter:
    """Writes the sampling parameters of one trace's requests. rng: the trace's.

    Answers are held to a grammar in half of the traces. Grammars and later parameters are drawn
    from generators of their own, so that a seed's requests stay what they were.
    """

    def __init__(self, rng: Random, vocab_size: int, seed: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._grammar_rng = Random(f"grammars {seed}")
        self._tag_rng = Random(f"structural tags {seed}")
        self._later_rng = Random(f"sampling {seed}")
        self._ending_rng = Random(f"endings {seed}")
        self._constrained_share = self._grammar_rng.choice((0.0, 0.3))

    def draw(self, prompt: Prompt) -> SamplingParams:
        rng = self._rng
        is_greedy = rng.random() < 0.5
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2, 4)),
            max_tokens=rng.choice(ANSWER_LENGTHS),
            temperature=0.0 if is_greedy else rng.choice((0.5, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
            repetition_penalty=1.0 if isinstance(prompt, Embeds) else rng.choice((1.0, 1.0, 1.2)),
            seed=rng.randrange(2**31),
            stop=rng.choice(STOPS) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, 0, 2, 5)),
            logit_bias={token_ids(rng, self._vocab_size, 1)[0]: 3.0} if rng.random() < 0.1 else {},
            structured_outputs=self._constraint(),
        )
        params = replace(params, **self._prompt_logprobs(prompt), **self._token_rules(params))
        return replace(params, **self._endings(params))

    def _constraint(self) -> StructuredOutput | None:
        rng = self._grammar_rng
        if rng.random() >= self._constrained_share:
            return None
        constraint = rng.choice(CONSTRAINTS)
        is_tag = self._tag_rng.random() < TAGS_SHARE
        return self._tag_rng.choice(TAGS) if is_tag else constraint

    def _token_rules(self, params: SamplingParams) -> dict[str, object]:
        """Which tokens may be drawn, and are told; a grammar and these may leave none in common."""
        rng, rules = self._later_rng, dict[str, object]()
        if params.structured_outputs is None and rng.random() < 0.1:
            ids = range(RESERVED_TOKENS, self._vocab_size)
            rules["allowed_token_ids"] = tuple(rng.sample(ids, 2 * len(ids) // 3))
        if params.structured_outputs is None and rng.random() < 0.15:
            rules["bad_words"] = rng.choice(BAD_WORDS)
        if rng.random() < 0.1:
            ids = range(self._vocab_size)
            rules |= {"logprob_token_ids": tuple(rng.sample(ids, 4)), "logprobs": 4}
        return rules

    def _endings(self, params: SamplingParams) -> dict[str, object]:
        """Tokens that end an answer, and how many must come before any does."""
        rng, endings = self._ending_rng, dict[str, object]()
        if rng.random() < 0.1:
            ids = range(RESERVED_TOKENS, self._vocab_size)
            endings["stop_token_ids"] = tuple(rng.sample(ids, len(ids) // 8))
        if rng.random() < 0.1:
            endings["min_tokens"] = (params.max_tokens or 0) // 2
        return endings

    def _prompt_logprobs(self, prompt: Prompt) -> dict[str, int]:
        """Ask for those of the whole prompt, or of its end, before which blocks may be found."""
        is_chosen = self._rng.random() < 0.1
        if isinstance(prompt, Embeds):
            return {}
        rng = self._later_rng
        part = rng.choice(({}, {"prompt_logprobs_last_n": rng.randrange(80)}))
        if isinstance(prompt, Tokens) and rng.random() < 0.3:
            part = {"prompt_logprob_start": rng.randrange(len(prompt.token_ids))}
        # More often than a whole one, which computes every prompt anew.
        return {"prompt_logprobs": 1, **part} if is_chosen or rng.random() < 0.1 else {}
