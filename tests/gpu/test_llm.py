"""tests/test_llm.py on the card: with --batch-invariant every bit is a lone, cold engine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_llm import (
    LoneServer,
    test_company_chunks_cache_and_preemption_change_no_bit,
    test_prompt_logprobs_and_penalties_are_exact_too,
)

__all__ = [
    "test_company_chunks_cache_and_preemption_change_no_bit",
    "test_prompt_logprobs_and_penalties_are_exact_too",
]

pytestmark = pytest.mark.gpu

EXACT: dict[str, Any] = {"device": "cuda", "batch_invariant": True}
ARITHMETIC: dict[str, dict[str, Any]] = {
    "float32": {**EXACT, "dtype": "float32"},
    "bfloat16": {**EXACT, "dtype": "bfloat16"},
    "bfloat16, eager": {**EXACT, "dtype": "bfloat16", "enforce_eager": True},
}


@pytest.fixture(scope="module", params=ARITHMETIC)
def lone(
    request: pytest.FixtureRequest, model_path: Path, adapter_paths: list[Path]
) -> Iterator[tuple[dict[str, Any], LoneServer]]:
    arithmetic = ARITHMETIC[request.param]
    server = LoneServer(model_path, adapter_paths, {**arithmetic, "enforce_eager": True})
    yield arithmetic, server
    server.close()
