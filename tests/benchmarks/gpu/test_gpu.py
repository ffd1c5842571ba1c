"""The GPU benchmark tried out on a CPU: every part runs, and the page has every table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import Measurement
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.shapes import SHAPES, model_config
from lora_serve.models.families import read_spec


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    measurement = Measurement("cpu", 60.0, directory, directory)
    measurement.measure_shape("tiny")
    measurement.measure_peers("tiny")
    assert measurement.failed == []
    return measurement.report.write(directory)


def test_every_part_is_measured_and_told(page: Path) -> None:
    text = page.read_text()
    assert page.name == "gpu-cpu.md"
    for told in ("| 4 | 4 |", "attention, 1 x 32 tokens", "lora gate up", "PEFT, an adapter each"):
        assert told in text
    assert "Left out" not in text
    assert "Failed" not in text


def test_the_json_holds_every_figure(page: Path) -> None:
    report = json.loads(page.with_suffix(".json").read_text())
    (shape,) = report["shapes"]
    assert {(t["num_requests"], t["num_adapters"]) for t in shape["decode"]} == {
        (1, 0),
        (4, 0),
        (4, 1),
        (4, 4),
    }
    assert [t["num_adapters"] for t in shape["serial_decode"]] == [0, 0]
    for timing in (*shape["decode"], *shape["exact_decode"], *shape["serial_decode"]):
        assert timing["tokens_per_second"] == pytest.approx(
            1e3 * timing["num_requests"] / timing["step_ms"]
        )
    assert {"torch", "transformers"} <= report["machine"]["packages"].keys()


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    measurement = Measurement("cpu", 0.0, tmp_path, tmp_path)
    measurement.measure_shape("tiny")
    assert measurement.report.notes == [
        "Left out, for want of time: tiny: engine.",
        "Left out, for want of time: tiny: kernels.",
        "Left out, for want of time: tiny: --batch-invariant.",
        "Left out, for want of time: tiny: --no-async-scheduling.",
    ]


def test_a_part_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    measurement = Measurement("cpu", 60.0, tmp_path, tmp_path)
    done: list[str] = []
    measurement.attempt("this", lambda: done.append(str(1 // 0)))
    measurement.attempt("that", lambda: done.append("that"))
    assert (measurement.failed, done) == (["this"], ["that"])
    assert "Failed: this: ZeroDivisionError" in (tmp_path / "gpu-cpu.md").read_text()


def test_the_nearer_ceiling_is_the_limit() -> None:
    ceilings = Ceilings(copy_gb_per_second=2.0, read_gb_per_second=4.0, bf16_tflops=1.0)
    assert ceilings.seconds(flops=3e12, num_bytes=4e9) == 3.0
    assert ceilings.seconds(flops=0.5e12, num_bytes=8e9) == 2.0


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_can_be_served(name: str) -> None:
    spec = read_spec(model_config(name), name)
    assert spec.hidden_size == SHAPES[name].hidden_size
    assert spec.head_size * spec.num_heads == spec.hidden_size
