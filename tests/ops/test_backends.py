from __future__ import annotations

import logging

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.ops import OP_GROUPS, override_ops
from lora_serve.ops.backends import available_ops, choose_ops, machine_numerics
from lora_serve.ops.reference import REFERENCE

FAST = REFERENCE.__class__(
    name="fast",
    numerics="fast-1",
    **{name: object() for group in OP_GROUPS.values() for name in group},  # type: ignore[arg-type]
)
BACKENDS = {"reference": REFERENCE, "fast": FAST}


def test_the_reference_is_always_there() -> None:
    assert available_ops()["reference"] is REFERENCE


def test_all_swaps_every_group() -> None:
    assert override_ops(FAST, ["all=reference"], BACKENDS) is REFERENCE
    assert choose_ops(["all=reference"]) == REFERENCE


def test_a_group_is_swapped_whole_and_shows_in_the_numerics() -> None:
    ops = override_ops(FAST, ["paged_attention=reference"], BACKENDS)
    assert ops.new_kv_cache is REFERENCE.new_kv_cache
    assert ops.plan_attention is REFERENCE.plan_attention
    assert ops.linear is FAST.linear
    assert ops.numerics == f"fast-1,paged_attention={REFERENCE.numerics}"


@pytest.mark.parametrize(
    ("override", "told"),
    [("lienar=reference", "'lienar'"), ("linear=gpu", "'gpu'"), ("linear", "''")],
)
def test_an_unknown_group_or_backend_is_refused_by_name(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose_ops([override])


def test_serving_without_native_kernels_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_ops([])
    expected = 0 if "cpu" in available_ops() else 1
    assert sum("plain torch" in record.message for record in caplog.records) == expected


def test_reference_results_depend_on_torch_and_its_threads() -> None:
    told = machine_numerics(REFERENCE)
    assert torch.__version__ in told
    assert f"threads={torch.get_num_threads()}" in told
    assert machine_numerics(REFERENCE) == told
    assert machine_numerics(FAST) == "fast-1"
