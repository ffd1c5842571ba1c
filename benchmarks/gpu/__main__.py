"""python -m benchmarks.gpu: the whole measurement in one command, made for under ten minutes.

Parts that do not fit in --minutes are left out and named, and so is a part that fails, because
time on a card is short: the others still run, and the exit status is 1 if one failed. The same
command again goes on with what is missing. --device cpu --shapes tiny tries the script out; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.shapes import SHAPES


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7B", "0.5B", "3B"])
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing new after them")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        measurement = Measurement(chosen.device, chosen.minutes, Path(directory), chosen.out)
        measurement.measure(chosen.shapes)
    page = measurement.write()
    print(page.read_text())
    print(f"written: {page} and {page.with_suffix('.json')}")
    if measurement.failed:
        sys.exit(f"failed: {', '.join(measurement.failed)}")


if __name__ == "__main__":
    main()
