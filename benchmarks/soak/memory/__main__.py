"""python -m benchmarks.soak.memory: does memory level off under rounds of equal load?

A round asks as much as any other, of contents that no other had. After each it is told what the API
process and its engine hold; at the end what is left once garbage is collected and malloc has given
back what it could, and of what there are more objects than before. Exit code 1 if the memory of the
last third of the rounds is above that of the third before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

from benchmarks.common.checks import Check, level, report
from benchmarks.common.facts import write_facts
from benchmarks.common.processes import engine_pid
from benchmarks.soak.cold_answers import MODEL_NAME
from benchmarks.soak.memory.load import Load
from benchmarks.soak.memory.reports import COLUMNS, MIB, Report, Reporter, environment, growth
from benchmarks.soak.versions import write_versions
from lora_serve.bench.http_stream import Origin
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.server_process import ServerProcess
from lora_serve.observability.table import text_table

MORE_MIB = 4  # that allocators may keep from one third to the next
FLAGS = (
    *("--served-model-name", MODEL_NAME, "--enable-prompt-embeds", "--cpu-threads", "1"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--max-model-len", "1024"),
    *("--num-gpu-blocks-override", "90", "--enable-lora", "--max-loras", "3"),
    *("--max-cpu-loras", "5", "--kv-ram-bytes", "3000000", "--kv-disk-bytes", "16000000"),
)
Rounds = dict[str, list[Report]]  # by process


def measure(args: argparse.Namespace, directory: Path) -> Rounds:
    demo = ensure_demo(print)
    for name in ("versions", "reports"):
        (directory / name).mkdir()
    os.environ.update(environment(directory / "reports", traces=args.trace))
    flags = (*FLAGS, "--kv-disk-path", str(directory / "kv"), *args.serve_args)
    versions = write_versions(demo, directory / "versions")
    with ServerProcess(demo.model, flags, directory / "log") as server:
        server.wait_until_healthy()
        load = Load(Origin.parse(server.base_url), versions, args.questions, Recipe().hidden_size)
        engine = engine_pid(server.pid)
        assert engine is not None, server.last_log_lines()
        reporters = {name: Reporter(pid, directory / "reports")
                     for name, pid in (("API", server.pid), ("engine", engine))}  # fmt: skip
        rounds: Rounds = {name: [] for name in reporters}
        for number in range(args.rounds):
            asyncio.run(load.round(number))
            for name, reporter in reporters.items():
                rounds[name].append(reporter.ask())
                print(f"round {number}, {name}: {'  '.join(rounds[name][-1].row)}", flush=True)
        for name, reporter in reporters.items():
            rounds[name] += reporter.ask_after_cleaning()
    return rounds


def tell(rounds: Rounds) -> None:
    for name, reports in rounds.items():
        titles = [*map(str, range(len(reports) - 2)), "collected", "trimmed"]
        rows = [(title, *each.row) for title, each in zip(titles, reports, strict=True)]
        print(f"\n{name}\n{text_table(('round', *COLUMNS), rows)}")
        first, last = reports[len(reports) // 3], reports[-3]
        for what in ("types", "lines"):
            if rows := growth(getattr(first, what), getattr(last, what)):
                print(text_table((f"more {what} since a third", "by"), rows))


def checks(rounds: Rounds) -> list[Check]:
    found = []
    for name, reports in rounds.items():
        resident = [each.resident_bytes / MIB for each in reports[:-2]]
        third = len(resident) // 3
        found.append(level(f"memory of {name}, MiB", resident[third : 2 * third],
                           resident[2 * third :], MORE_MIB))  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--questions", type=int, default=160, help="Of each round.")
    parser.add_argument(
        "--trace", action="store_true", help="Say which lines of Python hold more, slowly."
    )
    parser.add_argument("--out", type=Path, help="Where to write the JSON.")
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="Further flags.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives this
    with tempfile.TemporaryDirectory(prefix="memory-") as directory:
        rounds = measure(args, Path(directory))
    tell(rounds)
    found = checks(rounds)
    rows = {name: [each.figures for each in reports] for name, reports in rounds.items()}
    write_facts(args.out, flags=FLAGS, columns=COLUMNS, rows=rows, checks=found)
    report(found, ())


if __name__ == "__main__":
    main()
