"""Judge the server by vLLM's own HTTP tests: python -m benchmarks.compat [FILE …].

Prints a table and writes benchmarks/results/compat.json: what passes, what differs on purpose
(with the reason), what is not applicable, and what is left. Files that are not run keep their rows.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.facts import describe_machine, write_json
from benchmarks.common.make_checkpoint import AdapterShape, ensure_adapters
from benchmarks.common.page import folded, replace_between_marks
from benchmarks.compat.smollm2 import SHAPE, ensure_checkpoint
from benchmarks.compat.verdicts import verdict_of
from benchmarks.compat.vllm_suite import (
    FILES,
    OF_ANY_MODEL,
    SuiteResult,
    ensure_tests,
    install_test_packages,
    our_command,
    read_report,
    report_path,
    run_file,
)
from benchmarks.peers.environment import Environment, ensure_environment
from benchmarks.peers.vllm import VERSION, Vllm
from lora_serve.demo.model import ensure_demo

CACHE = Path.home() / ".cache" / "lora-serve"
COLUMNS = ("passed", "differs", "not applicable", "failed", "error", "skipped")


def outcome_of(result: SuiteResult) -> str:
    verdict = verdict_of(result)
    return verdict.kind if verdict else result.outcome


def table(results: Sequence[SuiteResult]) -> str:
    """One row a file, and their sum."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for row in (result.file.removeprefix("tests/"), "all"):
            counts.setdefault(row, Counter())[outcome_of(result)] += 1
    rows = sorted(counts, key=lambda row: (row == "all", row))
    lines = [f"| file | {' | '.join(COLUMNS)} |", "|---" + "|--:" * len(COLUMNS) + "|"]
    lines += [f"| {row} | {' | '.join(str(counts[row][c]) for c in COLUMNS)} |" for row in rows]
    return "\n".join(lines)


def section(results: Sequence[SuiteResult]) -> str:
    """The table, and below it why tests differ or do not apply, and what failed."""
    reasons, failed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for result in results:
        verdict = verdict_of(result)
        if verdict:
            reasons[(verdict.kind, verdict.reason)] += 1
        elif result.outcome in ("failed", "error"):
            failed[(Path(result.file).name, first_line(result.message))] += 1
    told = [f"- {kind} ({count}): {reason}" for (kind, reason), count in sorted(reasons.items())]
    told += [f"- failed ({count}), `{file}`: {why}" for (file, why), count in failed.items()]
    return folded("\n\n".join(part for part in (table(results), "\n".join(told)) if part))


def first_line(message: str) -> str:
    return " ".join(message.partition("\n")[0].split())[:120].replace("|", "/")


def merged(old: Sequence[SuiteResult], new: Sequence[SuiteResult]) -> list[SuiteResult]:
    """Every file's latest results."""
    files = {result.file for result in new}
    kept = [result for result in old if result.file not in files]
    return sorted([*kept, *new], key=lambda result: result.file)


def read_results(path: Path) -> list[SuiteResult]:
    if not path.is_file():
        return []
    files = json.loads(path.read_text())["results"]
    return [SuiteResult(file, **row) for file, rows in files.items() for row in rows]


def rows_of(results: Sequence[SuiteResult]) -> dict[str, list[dict[str, str]]]:
    """What `read_results` reads: what each file's tests said, and why if they say it."""
    rows: dict[str, list[dict[str, str]]] = {}
    for result in results:
        row = {"name": result.name, "outcome": result.outcome}
        why = {"message": result.message} if result.message else {}
        rows.setdefault(result.file, []).append(row | why)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="by the end of its path")
    parser.add_argument("--cache", type=Path, default=CACHE / "compat", metavar="DIR")
    parser.add_argument("--environments", type=Path, default=CACHE / "peers", metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/compat.json"))
    parser.add_argument("--page", type=Path, help="markdown to put the table into")
    parser.add_argument("--patience", type=float, default=600, help="seconds for a file's tests")
    parser.add_argument("--cpu-threads", type=int, metavar="N", help="of each server")
    parser.add_argument("--read-reports", action="store_true", help="of earlier runs; run nothing")
    args = parser.parse_args()
    chosen = [f for f in FILES if not args.files or any(map(f.endswith, args.files))]
    run = read_kept if args.read_reports else run_files
    results = read_results(args.results)
    for of_file in run(chosen, args):
        print(table(of_file), flush=True)
        results = merged(results, of_file)
        facts = {"vllm": VERSION, "machine": describe_machine()}
        write_json(args.results, {**facts, "results": rows_of(results)})
    print(section(results))
    if args.page:
        page = replace_between_marks(args.page.read_text(), "vllm-tests", section(results))
        args.page.write_text(page)


def read_kept(files: Sequence[str], args: argparse.Namespace) -> Iterator[list[SuiteResult]]:
    """The results of the files that were run before."""
    for file in files:
        if (report := report_path(file, args.cache)).is_file():
            yield read_report(file, report)


def run_files(files: Sequence[str], args: argparse.Namespace) -> Iterator[list[SuiteResult]]:
    peer, environment = Vllm(), Environment(args.environments / "vllm")
    ensure_environment(environment.root, peer.recipe, peer.install)
    install_test_packages(environment)
    model = ensure_checkpoint(args.cache)
    adapters = ensure_adapters(args.cache / "adapters", 1, AdapterShape(8), SHAPE)
    variables = {
        "COMPAT_COMMAND": our_command(args.cpu_threads),
        "COMPAT_ADAPTER": str(next(iter(adapters.values()))),
    }
    source = ensure_tests(args.cache)
    for file in files:
        served = ensure_demo(print).model if file == OF_ANY_MODEL else model
        of_file = {**variables, "COMPAT_MODEL": str(served)}
        yield run_file(file, source, environment, of_file, args.cache, args.patience)


if __name__ == "__main__":
    main()
