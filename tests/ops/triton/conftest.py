"""The Triton kernels, interpreted. On a machine with a card, `-m gpu` runs them compiled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lora_serve.ops.contract import Ops
from tests.ops.conftest import dtype

triton = pytest.importorskip("triton", reason="Triton is installed on Linux x86-64 only")

__all__ = ["dtype", "ops"]


@pytest.fixture
def ops() -> Ops:
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled on this machine: run the tests of -m gpu")
    from lora_serve.ops.triton.backend import load

    return load(torch.device("cpu"), batch_invariant=True)


@pytest.fixture(autouse=True)
def silent_overflow() -> Iterator[None]:
    """Keep numpy, in which the interpreter computes, as silent as a card."""
    with np.errstate(all="ignore"):
        yield
