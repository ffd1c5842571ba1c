"""Measures how long a server takes to start, and with what: `python -m benchmarks.speed.start`.

The parts are read from the times of the server's own log lines, and the first answer is one of a
token, asked for as soon as the server says that it is ready. Each start is one of a warm machine:
files and bytecode have been read before. Starts that read and pack the checkpoint take
turns with starts that map what an earlier one has kept (`--weights-cache-path`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.common.environment import as_users_have_it
from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve.bench.server import lora_serve_command
from lora_serve.demo.server_process import free_port
from lora_serve.models.kept_weights.cache import SUFFIX

PARTS: dict[
    str, str | tuple[str, ...]
] = {  # the end of each part, by what a line of the log begins with
    "until it says what it does": "lora-serve ",
    "until packages are there": "packages imported and settings checked",
    "until weights are there": ("weights read and packed", "packed weights checked and mapped"),
    "until it knows all": "the server's settings",
}
READY = "lora-serve is ready"
KEEPING_SECONDS = 300.0  # for a server to start, and to write what it has packed
JSON = {"Content-Type": "application/json"}


def one_start(checkpoint: Path, flags: tuple[str, ...]) -> dict[str, float]:
    """Seconds from the start of the process to the end of each part, and to its first answer."""
    port = free_port()
    command = lora_serve_command(str(checkpoint), port, flags)
    began = time.time()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=as_users_have_it()
        )
        assert server.stdout is not None
        try:
            if not server.stdout.readline().startswith(READY):
                raise RuntimeError(f"{' '.join(command)} did not start")
            ready = time.time() - began
            ask(port)
            answered = time.time() - began
        finally:
            server.terminate()
            server.wait()
        log.seek(0)
        lines = [json.loads(line) for line in log if line.startswith("{")]
    ends = {
        part: datetime.fromisoformat(line["time"]).timestamp() - began
        for part, beginning in PARTS.items()
        for line in lines
        if line["message"].startswith(beginning)
    }
    return {**ends, "until it is ready": ready, "until it has answered": answered}


def ask(port: int) -> None:
    """Get a token of the model that the server names."""
    server = f"http://127.0.0.1:{port}"
    with urlopen(f"{server}/v1/models") as models:
        model = json.load(models)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    with urlopen(Request(f"{server}/v1/completions", body, JSON)) as answer:
        answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a directory, made if it is not there, or a GGUF file",
    )
    parser.add_argument("--starts", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    is_file = args.checkpoint.is_file()
    checkpoint = args.checkpoint if is_file else ensure_checkpoint(args.checkpoint)
    flags = ("--max-model-len", "2048", "--log-format", "json")
    starts: dict[str, list[dict[str, float]]] = {"read and packed": [], "mapped": []}
    with tempfile.TemporaryDirectory(prefix="lora-serve-start-") as kept:
        keeping = (*flags, "--weights-cache-path", kept)
        keep(lora_serve_command(str(checkpoint), free_port(), keeping), Path(kept))
        for turn in range(args.starts + 1):
            for way, of_way in zip(starts, (flags, keeping), strict=True):
                start = one_start(checkpoint, of_way)
                starts[way] += [start] * (turn > 0)
    medians = {
        way: {part: statistics.median(start[part] for start in of_way) for part in of_way[0]}
        for way, of_way in starts.items()
    }
    for way, parts in medians.items():
        for part, seconds in parts.items():
            sys.stdout.write(f"{way:16} {part:30} {seconds:6.2f} s\n")
    write_facts(args.out, seconds=medians, starts=args.starts)


def keep(command: list[str], directory: Path) -> None:
    """Run a server until it has kept its weights."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + KEEPING_SECONDS
        while not list(directory.glob(f"*{SUFFIX}")):
            if server.poll() is not None or time.monotonic() > end:
                server.terminate()
                raise RuntimeError(f"{' '.join(command)} kept no weights; is the disk full?")
            time.sleep(0.1)
        server.terminate()


if __name__ == "__main__":
    main()
