from __future__ import annotations

import pytest

from lora_serve.engine.frontend.bad_words import BadWordEncoder
from lora_serve.engine.frontend.input import InputProcessor
from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import embeds_digest
from lora_serve.messages import EngineReady, EngineRequest
from lora_serve.prompts import EmbedsPrompt, Prompt, TokensPrompt
from lora_serve.sampling_params import SamplingParams


def processor(max_model_len: int = 100, num_blocks: int = 50) -> InputProcessor:
    model = EngineReady(
        vocab_size=128,
        hidden_size=4,
        max_model_len=max_model_len,
        max_request_tokens=min(max_model_len, num_blocks * 16),
    )
    return InputProcessor(
        model,
        block_size=16,
        eos_token_ids=(7,),
        max_logprobs=5,
        max_n=128,
        bad_words=BadWordEncoder(lambda text, _: list(text.encode())),
    )


def resolve(prompt: Prompt, params: SamplingParams | None = None, **limits: int) -> EngineRequest:
    request = GenerateRequest(request_id="r", prompt=prompt, params=params or SamplingParams())
    return processor(**limits).resolve(request)


def tokens(count: int) -> TokensPrompt:
    return TokensPrompt(tuple(range(1, count + 1)))


def test_choices_draw_with_seeds_in_a_row() -> None:
    choices = resolve(tokens(3), SamplingParams(n=3, seed=40)).choices
    assert [choice.seed for choice in choices] == [40, 41, 42]
    assert len({choice.request_id for choice in choices}) == 3


def test_without_a_seed_two_requests_draw_differently() -> None:
    seeds = [resolve(tokens(3)).request.params.seed for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_max_tokens_left_out_fills_the_context() -> None:
    message = resolve(tokens(30), SamplingParams(max_tokens=None))
    assert message.request.params.max_tokens == 70


def test_max_tokens_left_out_fills_a_pool_smaller_than_the_context() -> None:
    message = resolve(tokens(30), SamplingParams(max_tokens=None), num_blocks=3)
    assert message.request.params.max_tokens == 18


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_blocks", "numbers"),
    [
        (90, 11, 50, ("90", "11", "101", "100")),
        (100, None, 50, ("100", "101", "100")),
        (30, 19, 3, ("30", "19", "49", "48")),
    ],
)
def test_what_can_never_fit_is_refused_with_all_numbers(
    num_prompt: int, max_tokens: int | None, num_blocks: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        resolve(tokens(num_prompt), SamplingParams(max_tokens=max_tokens), num_blocks=num_blocks)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize("token_id", [-1, 128])
def test_a_token_outside_the_vocabulary_is_named(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(token_id)):
        resolve(TokensPrompt((1, token_id)))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        resolve(TokensPrompt(()))


def test_ignore_eos_leaves_no_end_token() -> None:
    assert resolve(tokens(1)).eos_token_ids == (7,)
    assert resolve(tokens(1), SamplingParams(ignore_eos=True)).eos_token_ids == ()


def test_embeddings_are_digested_block_by_block() -> None:
    data = bytes(range(200)) + bytes(120)  # 20 rows of 16 bytes
    message = resolve(EmbedsPrompt(20, data))
    assert message.embeds_digests == (embeds_digest(data[:256]), embeds_digest(data[256:]))
    assert message.request.prompt.token_ids == ()


@pytest.mark.parametrize(
    ("part", "start"),
    [
        ({}, 0),
        ({"prompt_logprob_start": 7}, 7),
        ({"prompt_logprobs_last_n": 3}, 6),
        ({"prompt_logprobs_last_n": 0}, 9),
        ({"prompt_logprobs_last_n": 99}, 0),
    ],
)
def test_the_engine_is_told_where_prompt_logprobs_begin(part: dict[str, int], start: int) -> None:
    params = resolve(tokens(10), SamplingParams(prompt_logprobs=1, **part)).request.params  # type: ignore[arg-type]
    assert (params.prompt_logprob_start, params.prompt_logprobs_last_n) == (start, None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(prompt_logprobs=1, prompt_logprob_start=10), "has 10 tokens; lower it"),
        (SamplingParams(prompt_logprob_start=1), "needs prompt_logprobs"),
        (SamplingParams(prompt_logprobs_last_n=1), "prompt_logprobs_last_n needs prompt_logprobs"),
        (
            SamplingParams(prompt_logprobs=1, prompt_logprob_start=1, prompt_logprobs_last_n=2),
            "exclude each other",
        ),
        (SamplingParams(prompt_logprobs=1, prompt_logprobs_last_n=-1), "got -1"),
    ],
)
def test_a_part_of_prompt_logprobs_that_cannot_be_is_refused(
    params: SamplingParams, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve(tokens(10), params)


def test_the_engine_is_told_of_allowed_tokens_as_a_bitmask_and_of_bad_words_as_tokens() -> None:
    asked = SamplingParams(allowed_token_ids=(2, 9, 2, 11), bad_words=("  no", "never"))
    message = resolve(tokens(3), asked)
    assert message.rules.allowed == bytes([0b100, 0b1010])
    # " no" is longer here than "no", so it is no form of its own
    assert message.rules.bad_words == (tuple(b"no"), tuple(b"never"))
    params = message.request.params
    assert (params.allowed_token_ids, params.bad_words) == (None, ())


def test_a_bad_word_behind_a_space_counts_where_that_is_another_token() -> None:
    vocabulary = {"no": [4], " no": [5], "x": [6], " x": [9, 6], "y": [7], " y": [7], " ": []}
    encoder = BadWordEncoder(lambda text, adds_special: vocabulary.get(text, []))
    assert encoder.token_ids(("no", "x", "y")) == ((4,), (5,), (6,), (7,))
    assert encoder.token_ids(("no",)) is encoder.token_ids(("no",)), "all prompts share them"
    with pytest.raises(InvalidRequestError, match="bad_words has ' ', which is no token"):
        encoder.token_ids((" ",))


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids", "is empty"),
        ({"allowed_token_ids": (3, 128)}, "allowed_token_ids", "token 128, which is out of"),
        ({"allowed_token_ids": (-1, 3)}, "allowed_token_ids", "token -1"),
        ({"allowed_token_ids": (1,) * 129}, "allowed_token_ids", "has 129 ids, at most 128"),
        ({"allowed_token_ids": (7,), "min_tokens": 1}, "allowed_token_ids", "allow another one"),
        (
            {"allowed_token_ids": (97, 98), "bad_words": ("a", "xb")},
            "allowed_token_ids",
            "allow another one",
        ),
        ({"bad_words": ("a",) * 129}, "bad_words", "has 129 strings, at most 128"),
        ({"bad_words": ("a" * 4097,)}, "bad_words", "4097 characters in all, at most 4096"),
        ({"bad_words": ("a", "")}, "bad_words", "empty string"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(
    params: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        resolve(tokens(3), SamplingParams(**params))  # type: ignore[arg-type]
    assert raised.value.param == param
