"""Every backend of this machine runs the same cases; `REFERENCE` is one of them."""

from __future__ import annotations

import pytest
import torch

from lora_serve.ops import Ops
from lora_serve.ops.backends import available_ops
from tests.fakes.threads import one_thread

__all__ = ["dtype", "one_thread", "ops"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=available_ops().values(), ids=lambda ops: ops.name)
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
