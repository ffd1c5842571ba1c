"""Put what was measured of fleets into the documents: `python -m benchmarks.fleet.report`.

Reads those of RECORDS that are in benchmarks/results, and writes each one's table between the marks
of its page. What is not measured stays as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.page import folded, replace_between_marks
from benchmarks.simulate.validate import HEADER, Compared, row_of

ROOT = Path(__file__).parents[2]
Facts = Mapping[str, Any]
NUM_SHOWN = 8  # columns of a validation: a page has no room for its tails


@dataclass(frozen=True, slots=True)
class Record:
    """A file of benchmarks/results, and the page and marks that its table belongs between."""

    file: str
    page: str
    marks: str
    table: Callable[[Facts], str]


def policies(facts: Facts) -> str:
    load = facts["workload"]
    header = ("server", "good answers/s", "first token, median ms", "p99 ms", "cache hits")
    rows = [
        (
            row["server"],
            f"{row['goodput']:.1f}",
            f"{row['first_token_median']:.0f}",
            f"{row['first_token_p99']:.0f}",
            f"{row['hits']:.0%}",
        )
        for row in facts["rows"]
    ]
    return (
        f"{load['num_requests']} requests by {load['num_clients']} clients for "
        f"{load['num_adapters']} adapters, prompts of {load['prefix_tokens']} shared and "
        f"{load['tail_tokens']} own tokens, answers of {load['max_tokens']}; good answers have "
        f"their first token within {load['slo_seconds']:g} s.\n\n{_table(header, rows)}"
    )


def prefill_decode(facts: Facts) -> str:
    load = facts["load"]
    header = ("servers", "first token, median ms", "p99 ms", "between tokens, median ms", "p99 ms")
    names = ("first_token", "first_token_p99", "token", "token_p99")
    rows = [(row["servers"], *(f"{row[name]:.1f}" for name in names)) for row in facts["rows"]]
    return (
        f"{load['model']}, {load['num_long']} prompts of {load['prompt_tokens']} tokens, one every "
        f"{load['every']:g} s, beside {load['num_short']} short ones that are answered all the "
        f"time.\n\n{_table(header, rows)}"
    )


def validated(facts: Facts) -> str:
    loads = msgspec.convert(facts["loads"], list[Compared])
    limits = facts["limits"]
    as_fitted = [one.errors_as_fitted for one in loads]
    return (
        f"Model: {facts['costs']['model']}. Good answers have their first token within "
        f"{limits['ttft']:g} ms and {limits['tpot']:g} ms a token. Medians of "
        f"{len(loads[0].rounds)} rounds, also of how far each was off; times in ms.\n\n"
        f"{_table(HEADER[:NUM_SHOWN], [row_of(one)[:NUM_SHOWN] for one in loads])}\n\n"
        f"With the pace of the fit throughout, goodput would be off by {_range(as_fitted, 0)}, and "
        f"the median time to the first token by {_range(as_fitted, 1)}."
    )


def _range(errors: Iterable[Sequence[float]], which: int) -> str:
    shares = sorted(error[which] for error in errors)
    return f"{shares[0]:+.1%} to {shares[-1]:+.1%}"


def soaked(facts: Facts) -> str:
    plan = facts["plan"]
    rows = [
        (check["title"], check["figures"] + ("" if check["passed"] else " (does not hold)"))
        for check in facts["checks"]
    ]
    return (
        f"{plan['num_replicas']} servers, {plan['num_adapters']:,} adapters, "
        f"{plan['seconds'] / 60:g} minutes, seed {plan['seed']}.\n\n"
        f"{_table(('check', 'figures'), rows)}"
    )


RECORDS = (
    Record("fleet_policies.json", "docs/fleet.md", "fleet-policies", policies),
    Record("prefill_decode.json", "docs/prefill-decode.md", "prefill-decode", prefill_decode),
    Record("simulate_demo.json", "docs/scale.md", "validate-demo", validated),
    Record("simulate_05b.json", "docs/scale.md", "validate-05b", validated),
    Record("fleet_soak.json", "docs/exactness.md", "fleet-soak", soaked),
)


def written(page: str, record: Record, facts: Facts) -> str:
    """The page with the record's table in it."""
    machine = facts["machine"]
    where = (
        f"Measured on {machine['cpu']}, {machine['num_cores']} cores, commit {machine['commit']} "
        f"([all figures](../benchmarks/results/{record.file}))."
    )
    text = folded(f"\n{where} {record.table(facts)}\n")
    return replace_between_marks(page, record.marks, text)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    for record in RECORDS:
        file, page = ROOT / "benchmarks/results" / record.file, ROOT / record.page
        if not file.exists():
            print(f"{record.file}: not measured")
            continue
        try:
            text = written(page.read_text(), record, json.loads(file.read_text()))
        except KeyError as missing:
            print(f"{record.file}: has no {missing}, as an older benchmark wrote it; run that anew")
            continue
        page.write_text(text)
        print(f"{record.file}: in {record.page}")


if __name__ == "__main__":
    main()
