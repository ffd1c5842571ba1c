from __future__ import annotations

import pytest

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
    return InputProcessor(model, block_size=16, eos_token_ids=(7,), max_logprobs=5)


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
