"""Measures from kill -9 of the engine to the next token: `python -m benchmarks.speed.recovery`.

A client asks for one token after another; the engine is killed between two of them. What the
client sees of it is the time from the kill to the first token after it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.demo.server_process import free_port

BODY = {"prompt": list(range(100, 164)), "max_tokens": 1, "temperature": 0}


async def measure(checkpoint: Path, num_kills: int) -> list[float]:
    """Seconds, for each kill."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = lora_serve_command(str(checkpoint), port, ("--max-model-len", "2048"))
    log = Path(tempfile.mkdtemp(prefix="recovery-")) / "server.log"
    seconds = []
    async with running_server(command, url, log), httpx.AsyncClient(base_url=url) as http:
        await next_token(http)
        for number in range(num_kills):
            if number:
                await asyncio.sleep(1.0)
            start = time.perf_counter()
            os.kill(engine_pid(log), signal.SIGKILL)
            await next_token(http)
            seconds.append(time.perf_counter() - start)
    return seconds


async def next_token(http: httpx.AsyncClient) -> None:
    """Ask until there is an answer."""
    while True:
        response = await http.post("/v1/completions", json=BODY, timeout=60)
        if response.status_code == 200:
            return
        assert response.status_code == 503, response.text
        await asyncio.sleep(0.05)


def engine_pid(log: Path) -> int:
    """The process that has the log open, is a child of the server, and has the most memory."""
    holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if holds(pid, log)]
    children = [pid for pid in holders if parent(pid) in holders]
    return max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def holds(pid: int, log: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/fd/1").resolve() == log.resolve()
    except OSError:  # it ended meanwhile, or is not ours to see
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--num-kills", type=int, default=1, help="from the second on they back off")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    seconds = asyncio.run(measure(ensure_checkpoint(args.checkpoint), args.num_kills))
    write_facts(args.out, seconds_to_the_next_token=seconds)
    print("seconds from the kill to the next token:", ", ".join(f"{s:.1f}" for s in seconds))


if __name__ == "__main__":
    main()
