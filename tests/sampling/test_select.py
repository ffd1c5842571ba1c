"""Which sampler serves beside which kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_serve.ops.contract import Ops, Runtime
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import override_ops
from lora_serve.sampling.lm_head_screening import with_screening
from lora_serve.sampling.native import NativeSampler
from lora_serve.sampling.select import select_sampler
from lora_serve.sampling.specification.sampler import SpecificationSampler

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")


@pytest.fixture(scope="module")
def ops() -> Ops:
    return cpu.load()


def test_each_backend_has_its_sampler(ops: Ops) -> None:
    assert isinstance(select_sampler(ops), NativeSampler)
    assert isinstance(select_sampler(REFERENCE), SpecificationSampler)


def test_sampling_can_be_swapped_for_the_reference(ops: Ops) -> None:
    swapped = override_ops(ops, ["sampling=reference"], {"reference": REFERENCE, "cpu": ops})
    assert isinstance(select_sampler(swapped), SpecificationSampler)
    assert swapped.linears.linear == ops.linears.linear
    assert swapped.numerics == f"{ops.numerics},sampling={REFERENCE.numerics}"


def test_sampling_by_the_reference_screens_nothing(ops: Ops) -> None:
    ops = replace(ops, pack_screen=lambda weight, packed: None)
    assert with_screening(ops, "on").pack_screen is not None
    assert with_screening(replace(ops, runtime=Runtime("reference")), "on").pack_screen is None
