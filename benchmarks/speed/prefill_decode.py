"""Long prompts beside running answers: one server prefills and one decodes, or two do both.

`python -m benchmarks.speed.prefill_decode --model MODEL`, on a quiet machine. Short prompts with
long answers stream all the time. Long prompts come one every `--every` seconds; of each it is
measured when its first token is there, and of the short ones how long tokens keep them waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import httpx

from benchmarks.common.facts import write_facts
from lora_serve.bench.client import EVERY_TOKEN
from lora_serve.demo.server_process import ServerProcess

PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True}


@dataclass
class Seconds:
    """first_token: of the long prompts. gaps: between two tokens of short prompts' answers."""

    first_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Milliseconds: medians, and what 99 of 100 took at most."""

    servers: str
    num_prompts: int
    first_token: float
    first_token_p99: float
    token: float
    token_p99: float

    @classmethod
    def of(cls, servers: str, seconds: Seconds) -> Row:
        first, gaps = sorted(seconds.first_token), sorted(seconds.gaps)
        figures = [(statistics.median(each), each[int(0.99 * len(each))]) for each in (first, gaps)]
        in_ms = [round(1e3 * figure, 1) for pair in figures for figure in pair]
        return cls(servers, len(first), *in_ms)


class Load:
    """Sends both kinds of prompts until it is over.

    decoders take turns. prefiller: where long prompts go first; None if the decoders compute them.
    """

    def __init__(
        self, options: argparse.Namespace, prefiller: str | None, decoders: Sequence[str]
    ) -> None:
        self._options = options
        self._prefiller = prefiller
        self._decoders = decoders
        self._is_over = threading.Event()
        self._http = httpx.Client(timeout=600)
        self.seconds = Seconds()

    def run(self) -> Seconds:
        threads = [
            threading.Thread(target=self._decode, args=(self._decoders[i % len(self._decoders)], i))
            for i in range(self._options.num_short)
        ]
        for thread in threads:
            thread.start()
        long_ones: list[threading.Thread] = []
        for number in range(self._options.num_long):
            thread = threading.Thread(target=self._prefill, args=(number,))
            thread.start()
            long_ones.append(thread)
            time.sleep(self._options.every)
        for thread in long_ones:
            thread.join()
        self._is_over.set()
        for thread in threads:
            thread.join()
        self._http.close()
        return self.seconds

    def _prompt(self, seed: str, num_tokens: int) -> list[int]:
        rng = Random(seed)
        return [rng.randrange(3, 700) for _ in range(num_tokens)]

    def _decode(self, url: str, number: int) -> None:
        for turn in count():
            prompt = self._prompt(f"short {number} {turn}", 32)
            last = None
            for now in self._tokens(url, prompt, self._options.answer_tokens, {}):
                if last is not None:
                    self.seconds.gaps.append(now - last)
                last = now
                if self._is_over.is_set():
                    return

    def _prefill(self, number: int) -> None:
        prompt, start = (
            self._prompt(f"long {number}", self._options.prompt_tokens),
            time.monotonic(),
        )
        url, more = self._decoders[number % len(self._decoders)], {}
        if self._prefiller is not None:
            body = self._body(prompt, 1) | {"kv_transfer_params": PREFILL}
            self._http.post(f"{self._prefiller}/v1/completions", json=body).raise_for_status()
            more = {"kv_transfer_params": DECODE}
        for now in self._tokens(url, prompt, 8, more):
            self.seconds.first_token.append(now - start)
            return

    def _tokens(
        self, url: str, prompt: list[int], max_tokens: int, more: dict[str, object]
    ) -> Iterator[float]:
        """When each token came."""
        body = self._body(prompt, max_tokens) | more | {"stream": True, **EVERY_TOKEN}
        with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield time.monotonic()

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, object]:
        return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


def serving(options: argparse.Namespace, roles: Sequence[str], stack: ExitStack) -> list[str]:
    """Start a server for each role, over one directory; their addresses."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = []
    for index, role in enumerate(roles):
        transfer = {
            "kv_role": role,
            "kv_connector_extra_config": {"kv_disk_path": str(directory / "kv")},
        }
        flags = ("--kv-transfer-config", json.dumps(transfer), *options.flag)
        process = ServerProcess(options.model, flags, directory / f"{index}.log")
        servers.append(stack.enter_context(process))
    for server in servers:
        server.wait_until_healthy()
    return [server.base_url for server in servers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="what the figures call the model")
    parser.add_argument("--flag", action="append", default=[], help="of each server, one word")
    parser.add_argument("--num-short", type=int, default=4, help="answers that run all the time")
    parser.add_argument("--num-long", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        prefiller, decoder = serving(options, ("kv_producer", "kv_consumer"), stack)
        rows.append(Row.of("1 + 1", Load(options, prefiller, [decoder]).run()))
    with ExitStack() as stack:
        mixed = serving(options, ("kv_both", "kv_both"), stack)
        rows.append(Row.of("2 mixed", Load(options, None, mixed).run()))
    for row in rows:
        print(row)
    names = ("num_short", "num_long", "prompt_tokens", "answer_tokens", "every", "flag")
    load = {"model": options.name or options.model.name} | {n: getattr(options, n) for n in names}
    write_facts(options.out, load=load, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
