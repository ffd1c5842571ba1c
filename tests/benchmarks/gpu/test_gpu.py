"""The GPU benchmark tried out on a CPU: every part runs, and the page has every table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import DecodeTiming, MeasuredEngine, covered
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.shapes import SHAPES, model_config
from lora_serve.models.registry import read_spec

FLAGS = ("--device", "cpu", "--shapes", "tiny", "--out")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpu")
    main((*FLAGS, str(directory)))
    return directory / "gpu-cpu.md"


def begin(out: Path, minutes: float = 60.0) -> Measurement:
    return Measurement("cpu", minutes, out, out)


def test_every_part_is_measured_and_told(page: Path) -> None:
    text = page.read_text()
    for told in (
        *("| 4 | 4 |", "attention, 1 x 32 tokens", "lora gate up", "rotary and KV write, 32 rows"),
        *("| 64 KV blocks to the host |", "| 64 KV blocks from the host |"),
        *("linear down, 4 rows |", "linear down, 4 rows, batch-invariant |"),
        *("| lora-serve |", "lora-serve, an adapter each", "PEFT, an adapter each"),
    ):
        assert told in text
    assert "Left out" not in text
    assert "Failed" not in text
    assert [path.name for path in sorted(page.parent.iterdir())] == ["gpu-cpu.json", "gpu-cpu.md"]


def test_the_json_holds_every_figure(page: Path) -> None:
    report = json.loads(page.with_suffix(".json").read_text())
    (shape,) = report["shapes"]
    assert {(t["num_requests"], t["num_adapters"]) for t in shape["served"]["decode"]} == {
        (1, 0),
        (4, 0),
        (4, 1),
        (4, 4),
    }
    for settings in ("serial", "separate"):
        assert [t["num_adapters"] for t in shape[settings]["decode"]] == [0, 0]
    assert [t["num_adapters"] for t in shape["served"]["first_token"]] == [1, 4]
    assert all(0 < t["median_ms"] <= t["worst_ms"] for t in shape["served"]["first_token"])
    for settings in ("served", "exact", "serial", "separate"):
        for timing in shape[settings]["decode"]:
            assert timing["tokens_per_second"] == pytest.approx(
                1e3 * timing["num_requests"] / timing["step_ms"]
            )
    assert {"torch", "transformers"} <= report["machine"]["packages"].keys()


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    measurement = begin(tmp_path, minutes=0.0)
    measurement.measure(["tiny"])
    assert measurement.report.notes == [
        f"Left out, for want of time: tiny: {part}."
        for part in (
            *("engine", "--batch-invariant", "--no-async-scheduling", "lora-serve beside peers"),
            *("transformers", "transformers + PEFT, an adapter each"),
            *("--no-overlap-launches", "kernels"),
        )
    ]


def test_a_part_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    measurement = begin(tmp_path)
    done: list[str] = []
    measurement.attempt("this", lambda: done.append(str(1 // 0)))
    measurement.attempt("that", lambda: done.append("that"))
    assert (measurement.failed, done) == (["this"], ["that"])
    assert "Failed: this: ZeroDivisionError" in (tmp_path / "gpu-cpu.md").read_text()


class KilledError(BaseException):
    """An exception that error handlers do not catch."""


def test_a_run_that_is_killed_has_written_what_it_found_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = MeasuredEngine.decode
    asked: list[tuple[int, int]] = []

    def counted(engine: MeasuredEngine, *case: int) -> DecodeTiming:
        asked.append(case[:2])
        if len(asked) == 3:
            raise KilledError
        return decode(engine, *case)

    monkeypatch.setattr(MeasuredEngine, "decode", counted)
    with pytest.raises(KilledError):
        begin(tmp_path).measure(["tiny"])
    kept = begin(tmp_path).report.shapes[0].served
    assert [(t.num_requests, t.num_adapters) for t in kept.decode] == asked[:2]
    assert list(kept.prefill) == [32]
    resumed = begin(tmp_path)
    resumed.measure(["tiny"])
    assert resumed.report.shapes[0].served.decode[:2] == kept.decode
    few = [(1, 0), (4, 0)]  # with other settings
    assert asked == [(1, 0), (4, 0), (4, 1), (4, 1), (4, 4), *few, *few, *few]
    idle = begin(tmp_path, minutes=0.0)
    idle.measure(["tiny"])
    assert (idle.report.shapes, idle.report.notes) == (resumed.report.shapes, [])


def test_time_that_ends_within_a_part_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = MeasuredEngine.prefill_tokens_per_second
    measurement = begin(tmp_path)

    def last(engine: MeasuredEngine, *case: int) -> float:
        monkeypatch.setattr(measurement, "_until", 0.0)
        return prefill(engine, *case)

    monkeypatch.setattr(MeasuredEngine, "prefill_tokens_per_second", last)
    measurement.measure(["tiny"])
    assert measurement.report.notes[0] == "Cut short, for want of time: tiny: engine."
    assert list(measurement.report.shapes[0].served.prefill) == [32]
    assert measurement.report.finished == measurement.failed == []


@pytest.mark.parametrize("change", ["commit", "torch"])
def test_figures_of_other_code_are_not_gone_on_with(
    page: Path, tmp_path: Path, change: str
) -> None:
    report = json.loads(page.with_suffix(".json").read_text())
    assert report["finished"]
    if change == "commit":
        report["machine"]["commit"] = "0000000"
    else:
        report["machine"]["packages"]["torch"] = "1.0"
    (tmp_path / "gpu-cpu.json").write_text(json.dumps(report))
    assert begin(tmp_path).report.finished == []


def test_a_report_of_an_earlier_form_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "gpu-cpu.json").write_text('{"device": "cpu"}')
    assert begin(tmp_path).report.finished == []


def test_time_in_which_several_kernels_ran_counts_once() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.25, 5.5)]) == 4.0
    assert covered([]) == 0.0


def test_the_nearer_ceiling_is_the_limit() -> None:
    ceilings = Ceilings(copy_gb_per_second=2.0, read_gb_per_second=4.0, bf16_tflops=1.0)
    assert ceilings.seconds(flops=3e12, num_bytes=4e9) == 3.0
    assert ceilings.seconds(flops=0.5e12, num_bytes=8e9) == 2.0


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_can_be_served(name: str) -> None:
    spec = read_spec(model_config(name), name)
    assert spec.hidden_size == SHAPES[name].hidden_size
    assert spec.head_size * spec.num_heads == spec.hidden_size
