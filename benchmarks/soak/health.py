"""Asks /health all the time, as a load balancer does: how long it takes, and when it says no.

In a process of its own, so that what it measures is the server: in the one of the soak's clients it
would measure their garbage collections and their crowds, too.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType

import msgspec

from benchmarks.soak.journal import UNEXPECTED, Journal
from lora_serve.bench.http_stream import Origin
from lora_serve.demo.server_process import dying_with_parent

PERIOD_SECONDS = 0.05
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One question and what came of it. begin, end: on the monotonic clock, which processes share.

    status: 0 if there was no answer.
    """

    begin: float
    end: float
    status: int
    text: str


class HealthProbe:
    """The process that asks, within the context; its probes come one a line into a file."""

    def __init__(self, origin: Origin, path: Path) -> None:
        self._origin = origin
        self._path = path

    def __enter__(self) -> HealthProbe:
        command = (sys.executable, "-m", __name__, self._origin.host, str(self._origin.port))
        with self._path.open("wb") as out:
            self._process = subprocess.Popen(dying_with_parent(command), stdout=out)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        has_ended = self._process.poll() is not None
        self._process.terminate()
        self._process.wait()
        if has_ended and error is None:
            raise RuntimeError(f"the probe of /health ended with {self._process.returncode}")

    def probes(self) -> list[Probe]:
        """All that were written down so far; the last line may be on its way."""
        lines = self._path.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Probe) for line in lines]


def note_refusals(probes: list[Probe], journal: Journal) -> None:
    """Note what was not healthy while an engine was there."""
    for probe in probes:
        if probe.status != 200 and not journal.was_down(probe.begin, probe.end):
            seconds = probe.begin - journal.began_at
            journal.note(UNEXPECTED, f"/health at {seconds:.1f} s: {probe.status} {probe.text}")


def permille_999(seconds: list[float]) -> float:
    """The 99.9th percentile; 0 of nothing."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.999 * len(ordered)))] if ordered else 0.0


def ask_health(host: str, port: int) -> Probe:
    begin = time.monotonic()
    connection = HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("GET", "/health", headers={"Connection": "close"})
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
    except (OSError, HTTPException) as error:
        status, text = 0, repr(error)
    finally:
        connection.close()
    return Probe(begin, time.monotonic(), status, text)


def main(host: str, port: str) -> None:
    while True:
        time.sleep(PERIOD_SECONDS)
        sys.stdout.buffer.write(msgspec.json.encode(ask_health(host, int(port))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
