"""Judge the server by vLLM's own HTTP tests: python -m benchmarks.compat [FILE …].

Prints a table and writes benchmarks/results/compat.json: what passes, what differs on purpose
(with the reason), what is not applicable, and what is left.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.facts import describe_machine
from benchmarks.common.make_checkpoint import AdapterShape, ModelShape, ensure_adapters
from benchmarks.compat.smollm2 import ensure_smollm2
from benchmarks.compat.verdicts import verdict_of
from benchmarks.compat.vllm_suite import (
    FILES,
    SuiteResult,
    ensure_tests,
    install_test_packages,
    our_command,
    run_file,
)
from benchmarks.peers.environment import Environment, ensure_environment
from benchmarks.peers.vllm import VERSION, Vllm

CACHE = Path.home() / ".cache" / "lora-serve"
SMOLLM2 = ModelShape(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49_152,
)
COLUMNS = ("passed", "differs", "not applicable", "failed", "error", "skipped")


def outcome_of(result: SuiteResult) -> str:
    if result.outcome == "passed":
        return "passed"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="by the end of its path")
    parser.add_argument("--cache", type=Path, default=CACHE / "compat", metavar="DIR")
    parser.add_argument("--environments", type=Path, default=CACHE / "peers", metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/compat.json"))
    parser.add_argument("--patience", type=float, default=600, help="seconds for a file's tests")
    args = parser.parse_args()
    chosen = [f for f in FILES if not args.files or any(map(f.endswith, args.files))]
    peer, environment = Vllm(), Environment(args.environments / "vllm")
    ensure_environment(environment.root, peer.recipe, peer.install)
    install_test_packages(environment)
    model = ensure_smollm2(args.cache)
    adapters = ensure_adapters(args.cache / "adapters", 1, AdapterShape(8), SMOLLM2)
    variables = {
        "COMPAT_COMMAND": our_command(),
        "COMPAT_MODEL": str(model),
        "COMPAT_ADAPTER": str(next(iter(adapters.values()))),
    }
    results: list[SuiteResult] = []
    source = ensure_tests(args.cache)
    for file in chosen:
        results += run_file(file, source, environment, variables, args.cache, args.patience)
        print(table(results[-1:]), flush=True)
    print(table(results))
    facts = {"vllm": VERSION, "machine": asdict(describe_machine())}
    rows = [{**asdict(result), "outcome": outcome_of(result)} for result in results]
    args.results.write_text(json.dumps({**facts, "results": rows}, indent=1))


if __name__ == "__main__":
    main()
