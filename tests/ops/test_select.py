from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lora_serve.config.overrides import BACKENDS as NAMED_BACKENDS
from lora_serve.config.overrides import OPS, ROWWISE_OPS
from lora_serve.errors import ConfigError
from lora_serve.ops.contract import Ops, RowwiseKernels, Runtime
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import (
    CPU,
    OP_GROUPS,
    available_ops,
    choose_ops,
    machine_numerics,
    override_ops,
)

FAST = Ops.of_one_backend(
    name="fast",
    numerics="fast-1",
    device=torch.device("cpu"),
    rowwise=SimpleNamespace(**{name: object() for name in ROWWISE_OPS}),
    linears=SimpleNamespace(),
    experts=SimpleNamespace(),
    adapters=SimpleNamespace(),
    attention=SimpleNamespace(),
    graph_plans=SimpleNamespace(),
    record=lambda run: None,
    runtime=Runtime("fast"),
)
BACKENDS = {"reference": REFERENCE, "fast": FAST}


def test_the_reference_is_always_there() -> None:
    assert available_ops()["reference"] is REFERENCE


def test_all_swaps_every_group() -> None:
    assert override_ops(FAST, ["all=reference"], BACKENDS) is REFERENCE
    assert choose_ops(["all=reference"], CPU) == REFERENCE


def test_a_group_is_swapped_whole_and_shows_in_the_numerics() -> None:
    ops = override_ops(FAST, ["paged_attention=reference"], BACKENDS)
    assert ops.attention is REFERENCE.attention
    assert ops.linears is FAST.linears
    assert ops.numerics == f"fast-1,paged_attention={REFERENCE.numerics}"


def test_experts_and_quantised_and_screened_linears_are_swapped_with_the_others() -> None:
    ops = override_ops(FAST, ["linear=reference"], BACKENDS)
    assert ops.linears is REFERENCE.linears
    assert ops.pack_quantized is REFERENCE.pack_quantized
    assert ops.pack_screen is REFERENCE.pack_screen
    assert ops.experts is REFERENCE.experts


@pytest.mark.parametrize("name", ROWWISE_OPS)
def test_a_rowwise_kernel_is_swapped_alone(name: str) -> None:
    ops = override_ops(FAST, [f"{name}=reference"], BACKENDS)
    for other in ROWWISE_OPS:
        source = REFERENCE if other == name else FAST
        assert getattr(ops.rowwise, other) is getattr(source.rowwise, other)
    assert ops.numerics == f"fast-1,{name}={REFERENCE.numerics}"


def test_every_rowwise_kernel_can_be_named() -> None:
    methods = [name for name in vars(RowwiseKernels) if not name.startswith("_")]
    assert sorted(methods) == sorted(ROWWISE_OPS)


def test_what_can_be_named_is_what_there_is() -> None:
    assert sorted(OPS) == sorted([*OP_GROUPS, "all"])
    assert set(available_ops()) <= set(NAMED_BACKENDS)


def test_kernels_of_two_backends_are_not_recorded_by_the_rules_of_one() -> None:
    ops = override_ops(FAST, ["rms_norm=reference"], BACKENDS)
    assert ops.graph_plans is None
    assert ops.record is None


@pytest.mark.parametrize(
    ("override", "told"),
    [("lienar=reference", "'lienar'"), ("linear=gpu", "'gpu'"), ("linear", "''")],
)
def test_an_unknown_group_or_backend_is_refused_by_name(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose_ops([override], CPU)


def test_kernels_of_two_devices_do_not_mix() -> None:
    elsewhere = replace(FAST, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="linear=reference: it works on cpu, the others on cuda"):
        override_ops(elsewhere, ["linear=reference"], BACKENDS)


def test_triton_is_refused_on_a_cpu_that_does_not_interpret_it() -> None:
    if "triton" in available_ops():
        pytest.skip("TRITON_INTERPRET is set")
    with pytest.raises(ConfigError, match=r"backend 'triton' is not available.*TRITON_INTERPRET=1"):
        choose_ops(["all=triton"], CPU)


def test_serving_without_native_kernels_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_ops([], CPU)
    expected = 0 if "cpu" in available_ops() else 1
    assert sum("plain torch" in record.message for record in caplog.records) == expected


def test_reference_results_depend_on_torch_and_its_threads() -> None:
    told = machine_numerics(REFERENCE)
    assert torch.__version__ in told
    assert f"threads={torch.get_num_threads()}" in told
    assert machine_numerics(REFERENCE) == told
    assert machine_numerics(FAST) == "fast-1"
