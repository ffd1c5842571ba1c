"""What benchmarks of fleets have recorded stands in the documents, each at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.page import marks
from benchmarks.fleet.report import RECORDS, Record, written

ROOT = Path(__file__).parents[3]
MACHINE = {"cpu": "a processor", "num_cores": 2, "commit": "abc"}


def side(goodput: float, ttft: float) -> dict[str, Any]:
    rate = {"requests_per_second": goodput, "tokens_per_second": 3.0, "share": 1.0}
    rest = {"ttft_p99": 11.0, "tpot_p50": 1.0, "cached_tokens": 0}
    return {"goodput": rate, "ttft_p50": ttft, **rest}


SIDE = side(2.0, 10.0)
VALIDATED: dict[str, Any] = {
    "limits": {"ttft": 40.0, "tpot": 3.0},
    "costs": {"model": "a model"},
    "loads": [
        {
            "load": "closed loop of 1",
            "rounds": [
                {"rate": None, "paces": [1.1, 1.3], "measured": SIDE, "simulated": side(2.1, 9.8)}
                | {"as_fitted": side(1.0, 1.0)},
                {"rate": None, "paces": [1.1, 1.3], "measured": side(2.5, 8.0), "simulated": SIDE}
                | {"as_fitted": side(1.0, 1.0)},
                {"rate": None, "paces": [1.1, 1.3], "measured": SIDE, "simulated": side(2.4, 9.0)}
                | {"as_fitted": side(1.0, 1.0)},
            ],
        }
    ],
}
FACTS: dict[str, dict[str, Any]] = {
    "fleet_policies.json": {
        "workload": {
            "num_requests": 600,
            "num_clients": 16,
            "num_adapters": 64,
            "prefix_tokens": 512,
            "tail_tokens": 32,
            "max_tokens": 16,
            "slo_seconds": 1.0,
        },
        "rows": [
            {
                "server": "2 replicas, affinity",
                "goodput": 12.34,
                "first_token_median": 56.0,
                "first_token_p99": 789.0,
                "hits": 0.5,
            }
        ],
    },
    "prefill_decode.json": {
        "load": {
            "model": "a model",
            "num_short": 4,
            "num_long": 30,
            "prompt_tokens": 2000,
            "every": 2.0,
        },
        "rows": [
            {
                "servers": "1 + 1",
                "first_token": 50.0,
                "first_token_p99": 60.0,
                "token": 4.0,
                "token_p99": 7.5,
            }
        ],
    },
    "simulate_demo.json": VALIDATED,
    "simulate_05b.json": VALIDATED,
    "fleet_soak.json": {
        "plan": {"num_replicas": 3, "num_adapters": 1000, "seconds": 300.0, "seed": 1},
        "checks": [{"title": "met: each kind", "passed": False, "figures": "1"}],
    },
}
VALIDATED_ROW = (
    "| closed loop of 1 | 1.20 | 2 (2 to 2.5) | 2.1 | +5.0% | 10 (8 to 10) | 9.8 | -2.0% |"
)
ROWS = {
    "fleet_policies.json": "| 2 replicas, affinity | 12.3 | 56 | 789 | 50% |",
    "prefill_decode.json": "| 1 + 1 | 50.0 | 60.0 | 4.0 | 7.5 |",
    "simulate_demo.json": VALIDATED_ROW,
    "simulate_05b.json": VALIDATED_ROW,
    "fleet_soak.json": "| met: each kind | 1 (does not hold) |",
}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.file)
def test_a_record_goes_between_the_marks_of_its_page(record: Record) -> None:
    page = (ROOT / record.page).read_text()
    found = written(page, record, {"machine": MACHINE, **FACTS[record.file]})
    begin, end = marks(record.marks)
    assert found.partition(begin)[0] == page.partition(begin)[0]
    assert found.partition(end)[2] == page.partition(end)[2]
    text = found.partition(begin)[2].partition(end)[0]
    assert ROWS[record.file] in text.splitlines()
    assert "a processor, 2 cores, commit abc" in " ".join(text.split())
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 100
