"""What requests may ask of sampling, at random."""

from __future__ import annotations

import random

from msgspec.structs import replace

from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.seen_tokens import seen_tokens

# Of the scheduler and the server, or told to a step in another way than by its params.
NOT_SEEN_BY_A_SAMPLER = {
    *("n", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "structured_outputs", "reasoning"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs", "prompt_logprob_start"),
    *("prompt_logprobs_last_n", "thinking_token_budget"),
}


def any_bitmask(vocab_size: int, rng: random.Random) -> bytes:
    """Much, little or nothing allowed; shorter than the vocabulary, as long, or longer."""
    num_bytes = max(0, -(-vocab_size // 8) + rng.choice((-2, 0, 0, 0, 3)))
    few, many = rng.randbytes(num_bytes), rng.randbytes(num_bytes)
    merges = (int.__and__, int.__or__, lambda a, b: 0xFF, lambda a, b: 0, _rarely)
    merge = rng.choice(merges)
    return bytes(merge(a, b) for a, b in zip(few, many, strict=True))


def _rarely(a: int, b: int) -> int:
    return a if b % 16 == 0 else 0


def inputs_for(num_rows: int, vocab_size: int, seed: int) -> list[SampleInput]:
    """Each row with its own choices: every filter and every edit alone and with others."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(-2, vocab_size + 2) for _ in range(count)]

    def params() -> SamplingParams:
        is_penalized = rng.random() < 0.3
        return SamplingParams(
            temperature=rng.choice([0.0, 1e-5, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, -1, 1, 7, vocab_size - 1, vocab_size, 10**9]),
            top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-12, 0.999999]),
            min_p=rng.choice([0.0, 0.0, 1e-30, 0.01, 0.4, 1.0]),
            logprobs=rng.choice([None, None, 0, 3, 20]),
            logit_bias=dict.fromkeys(ids(3), rng.uniform(-9, 9)) if rng.random() < 0.3 else {},
            repetition_penalty=rng.choice([1.0, 1.3, 0.7]) if is_penalized else 1.0,
            frequency_penalty=rng.choice([0.0, 0.4, -0.3]) if is_penalized else 0.0,
            presence_penalty=rng.choice([0.0, 0.6]) if is_penalized else 0.0,
        )

    def told(asked: SamplingParams) -> SamplingParams:
        if asked.logprobs is None or rng.random() < 0.7:
            return asked
        listed = tuple(dict.fromkeys(rng.choices(range(vocab_size), k=5)))
        return replace(asked, logprobs=len(listed), logprob_token_ids=listed)

    return [
        SampleInput(
            told(params()),
            seed=rng.randrange(-(2**63), 2**63),
            position=rng.randrange(2**40),
            seen=seen_tokens(ids(40), ids(30)),
            banned_token_ids=ids(2) if rng.random() < 0.3 else (),
            bitmask=any_bitmask(vocab_size, rng) if rng.random() < 0.2 else None,
        )
        for _ in range(num_rows)
    ]
