"""Adapters that act from their invocation tokens on: what is before is the base model's, and found.

In the oracle, and on a real model beside PEFT.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_serve.errors import InvalidRequestError
from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, OracleEngine
from lora_serve.fuzz.oracle.loader import INVOCATION, oracle_checkpoint
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.identity import BlockHasher
from lora_serve.llm import LLM
from lora_serve.messages import ResetPrefixCache
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import EmbedsPrompt, MixedPrompt, TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.mutant_hashers import KeyIgnoresWhereAnAdapterBegins
from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model

CONTENT = "red-2"  # activated
DIGEST = oracle_checkpoint("/red", CONTENT).digest
SHARED = list(range(20, 20 + 3 * BLOCK_SIZE))
PROMPT = [*SHARED, *INVOCATION, *range(100, 100 + BLOCK_SIZE)]
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE


def engine_with_red(hasher_class: type[BlockHasher] = BlockHasher) -> OracleEngine:
    engine = OracleEngine(hasher_class=hasher_class)
    engine.load("red", "/red", CONTENT)
    engine.run()
    return engine


def ask(engine: OracleEngine, request_id: str, prompt: list[int], lora_name: str = "red") -> int:
    """How many blocks were found."""
    engine.add(request_id, prompt, lora_name=lora_name)
    engine.run()
    return engine.num_cached(request_id) // BLOCK_SIZE


def right(prompt: list[int]) -> list[int]:
    return lone_answer(prompt, DIGEST, 4, invocation=INVOCATION)


def test_blocks_before_the_invocation_are_shared_with_the_base_model_both_ways() -> None:
    engine = engine_with_red()
    engine.add("base", PROMPT)
    engine.run()
    assert ask(engine, "red", PROMPT) == len(SHARED) // BLOCK_SIZE
    assert ask(engine, "again", PROMPT) == NUM_BLOCKS
    assert engine.tokens("red") == engine.tokens("again") == right(PROMPT)
    assert engine.tokens("base") == lone_answer(PROMPT, b"", 4) != right(PROMPT)

    engine = engine_with_red()
    assert ask(engine, "red", PROMPT) == 0
    engine.add("base", PROMPT)
    engine.run()
    assert engine.num_cached("base") == len(SHARED)
    assert engine.tokens("base") == lone_answer(PROMPT, b"", 4)


def test_a_reset_of_the_adapter_leaves_the_base_models_blocks() -> None:
    engine = engine_with_red()
    ask(engine, "red", PROMPT)
    engine.handle(ResetPrefixCache(1, "red"))
    engine.run()
    assert ask(engine, "again", PROMPT) == len(SHARED) // BLOCK_SIZE
    assert engine.tokens("again") == right(PROMPT)


def test_a_prompt_without_the_tokens_is_refused_and_leases_nothing() -> None:
    engine = engine_with_red()
    engine.add("red", [*SHARED, INVOCATION[0]], lora_name="red")
    error = engine.last("red").error
    assert error is not None
    assert error.kind == InvalidRequestError.__name__
    assert "its invocation tokens [3, 4]" in error.message
    assert engine.core.adapters.infos()[0].num_leases == 0


def prompts_with_one_block_and_two_beginnings() -> tuple[list[int], list[int]]:
    """The second block is the same; in one the adapter begins at its end, in the other before."""
    block = [*range(40, 50), *INVOCATION, 50, 51, 52, INVOCATION[0]]
    assert len(block) == BLOCK_SIZE
    begin, end = SHARED[:BLOCK_SIZE], list(range(200, 200 + BLOCK_SIZE))
    return [*begin, *block, INVOCATION[1], *end], [*begin, *block, *end, *end]


def is_found_where_another_begins(hasher_class: type[BlockHasher]) -> bool:
    engine = engine_with_red(hasher_class)
    late, early = prompts_with_one_block_and_two_beginnings()
    ask(engine, "late", late)
    assert engine.tokens("late") == right(late)
    num_found = ask(engine, "early", early)
    assert (engine.tokens("early") == right(early)) is (num_found == 1)
    return num_found > 1


def test_a_block_in_which_the_adapter_begins_elsewhere_is_another() -> None:
    assert not is_found_where_another_begins(BlockHasher)
    assert is_found_where_another_begins(KeyIgnoresWhereAnAdapterBegins)


# ── a real model, beside PEFT ───────────────────────────────────────────────────────────────────

TOKENS = [5, 6]
REAL_PROMPT = [(11 * i + 7) % 90 for i in range(70)]
INVOKED = [*REAL_PROMPT[:20], *TOKENS, *REAL_PROMPT[20:50], *TOKENS, *REAL_PROMPT[50:]]
ALL = SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("activated")
    model = make_peft("qwen2", 1, task_type="CAUSAL_LM", alora_invocation_tokens=TOKENS)
    model.save_pretrained(str(root / "adapter"))
    return save_served_model(root / "model", "qwen2"), root / "adapter"


def serving(paths: tuple[Path, Path], **settings: object) -> LLM:
    llm = LLM(  # type: ignore[arg-type]
        str(paths[0]), dtype="float32", enable_lora=True, max_logprobs=-1, **settings
    )
    llm.load_lora_adapter("red", str(paths[1]))
    return llm


def test_an_activated_adapter_answers_as_in_peft_and_over_the_base_models_blocks_the_same(
    paths: tuple[Path, Path],
) -> None:
    cold = serving(paths, enable_prefix_caching=False)
    prompt = TokensPrompt(tuple(INVOKED))
    (alone,) = cold.generate(prompt, ALL, lora_name="red")
    (plain,) = cold.generate(prompt, ALL)
    cold.close()
    assert alone.outputs[0].logprobs != plain.outputs[0].logprobs
    assert alone.prompt_logprobs[:52] == plain.prompt_logprobs[:52]
    assert alone.prompt_logprobs != plain.prompt_logprobs

    peft = make_peft("qwen2", 1, task_type="CAUSAL_LM", alora_invocation_tokens=TOKENS)
    with torch.no_grad():
        logits = peft(input_ids=torch.tensor([INVOKED])).logits[0, -1]
    expected = torch.log_softmax(logits.float(), -1)
    first = alone.outputs[0].logprobs[0]
    found = dict(first.top)
    assert len(found) == len(expected)
    torch.testing.assert_close(
        torch.tensor([found[i] for i in range(len(expected))]), expected, atol=2e-4, rtol=0
    )

    with_cache = serving(paths, enable_prefix_caching=True, max_num_batched_tokens=24)
    quick = SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1)
    with_cache.generate(prompt, quick)
    (over_base,) = with_cache.generate(prompt, quick, lora_name="red")
    (again,) = with_cache.generate(prompt, quick, lora_name="red")
    with_cache.close()
    assert over_base.num_cached_tokens == 48
    assert again.num_cached_tokens == 64
    for output in (over_base, again):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs


def embedded(start: int, stop: int, table: torch.Tensor) -> EmbedsPrompt:
    """What the model makes of INVOKED's tokens from start to stop."""
    rows = table[torch.tensor(INVOKED[start:stop])]
    return EmbedsPrompt(len(rows), rows.contiguous().view(torch.uint8).numpy().tobytes())


def test_embedding_rows_among_the_tokens_are_the_base_models_up_to_the_invocation(
    paths: tuple[Path, Path],
) -> None:
    table = load_file(paths[0] / "model.safetensors")["model.embed_tokens.weight"]
    first, other = embedded(10, 45, table), embedded(60, 62, table)
    mixed = MixedPrompt.of((INVOKED[:10], first, INVOKED[45:60], other, INVOKED[62:]))
    quick = SamplingParams(temperature=0.0, max_tokens=4, logprobs=-1)
    settings = {"enable_prompt_embeds": True, "max_num_batched_tokens": 24}
    with serving(paths, enable_prefix_caching=False, **settings) as cold:
        (of_tokens,) = cold.generate(TokensPrompt(tuple(INVOKED)), quick, lora_name="red")
        (alone,) = cold.generate(mixed, quick, lora_name="red")
        with pytest.raises(
            InvalidRequestError, match=r"prompt of embeddings alone holds no tokens"
        ):
            cold.generate(embedded(0, 40, table), quick, lora_name="red")
    assert alone.outputs[0].logprobs == of_tokens.outputs[0].logprobs
    with serving(paths, enable_prefix_caching=True, **settings) as warm:
        warm.generate(mixed, quick)
        (over_base,) = warm.generate(mixed, quick, lora_name="red")
    assert over_base.num_cached_tokens == 48
    assert over_base.outputs[0].logprobs == alone.outputs[0].logprobs


def test_an_embedding_of_an_activated_adapter_is_pefts_and_the_same_over_the_base_models_blocks(
    paths: tuple[Path, Path],
) -> None:
    prompt, last = TokensPrompt(tuple(INVOKED)), PoolingParams(normalize=False)
    with serving(paths, enable_prefix_caching=False) as cold:
        (alone,) = cold.embed(prompt, last, lora_name="red")
        (plain,) = cold.embed(prompt, last)
    assert alone.embedding != plain.embedding
    peft = make_peft("qwen2", 1, task_type="CAUSAL_LM", alora_invocation_tokens=TOKENS)
    with torch.no_grad():
        states = peft(input_ids=torch.tensor([INVOKED]), output_hidden_states=True).hidden_states
    expected = states[-1][0, -1]
    torch.testing.assert_close(torch.tensor(alone.embedding), expected, atol=2e-4, rtol=0)
    with serving(paths, enable_prefix_caching=True, max_num_batched_tokens=24) as warm:
        warm.embed(prompt, last)
        (over_base,) = warm.embed(prompt, last, lora_name="red")
    assert over_base.num_cached_tokens == 48
    assert over_base.embedding == alone.embedding
