from __future__ import annotations

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import KVLoad

PROMPT = list(range(100, 148))
MAX_TOKENS = 8
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, seed=1, ignore_eos=True)


def answer_with_block_replaced(index: int, other: int) -> list[int]:
    """The answer, if after its first token one block holds what another one does."""
    engine = OracleEngine()
    engine.add("r", PROMPT, params=PARAMS)
    engine.step()
    request = engine.core.scheduler.get("r")
    assert request is not None
    executor, blocks = engine.executor, request.block_tables[0].block_ids
    executor.scatter(KVLoad(blocks[index], executor.gather(blocks[other])))
    engine.run()
    return engine.tokens("r")


def test_a_foreign_block_shows_wherever_it_is_in_the_prefix() -> None:
    right = lone_answer(PROMPT, b"", MAX_TOKENS)
    assert len(right) == MAX_TOKENS
    assert answer_with_block_replaced(1, 1) == right
    for index in range(3):
        assert answer_with_block_replaced(index, (index + 1) % 3) != right
