"""Every backend of this machine runs the same cases; `REFERENCE` is one of them.

So do the kernels of a GPU where there is one and `-m gpu` asks for it, with --batch-invariant,
because the cases ask for equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet

from lora_serve.ops.contract import Ops
from lora_serve.ops.select import available_ops, choose_ops
from tests.fakes.hosted_ops import HostedOps
from tests.fakes.threads import one_thread

__all__ = ["dtype", "one_thread", "ops", "poisoned_memory"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backends() -> list[ParameterSet]:
    found = [pytest.param(ops, id=name) for name, ops in available_ops().items()]
    if torch.cuda.is_available():
        hosted = HostedOps(choose_ops((), torch.device("cuda"), batch_invariant=True)).ops()
        found.append(pytest.param(hosted, id="cuda", marks=pytest.mark.gpu))
    return found


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New memory of torch's is full of NaN, so that an output that was not written shows.

    Not on a card, where the same setting forbids operations.
    """
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=backends())
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
