"""python -m benchmarks.speed.neighbour: what another's parameters cost a neighbour's decode.

A neighbour streams an answer, greedily, while another request of --n choices runs: once with no
parameters but its lengths, then with the most that its body may ask of every step (biases, stop
tokens that are banned, penalties, logprobs, stop strings). Both take turns. What is compared is the
mean time between two tokens of the neighbour while the other runs, and the server's processor time
meanwhile, which says more on a busy machine; alone both are told as well. Client and server share
the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from statistics import median

import httpx

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from benchmarks.common.processes import server_cpu_seconds
from lora_serve.demo.model import ensure_demo
from lora_serve.demo.server_process import ServerProcess
from lora_serve.sampling_params import MAX_LOGIT_BIASES

PROMPT = list(range(5, 37))
SECONDS = 600.0  # in which an answer must have come

# Each as large as it may be; top_k, which depends on the vocabulary, comes beside it. No answer
# holds one of these texts, nor ends by its stop tokens.
WORST = {
    "stop_token_ids": list(range(128)),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logprobs": 20,
    "stop": [chr(0x4E00 + index) * 1024 for index in range(16)],
    "top_p": 0.9,
    "min_p": 0.01,
}


@dataclass(frozen=True, slots=True)
class Pace:
    """What a token of the neighbour takes, in the mean. cpu_seconds: of all the server does."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Decode:
    """The neighbour's pace, by turn."""

    alone: tuple[Pace, ...]
    beside_plain: tuple[Pace, ...]
    beside_worst: tuple[Pace, ...]

    def cost(self, of: Callable[[Pace], float]) -> float:
        """Which share of it the other's parameters add, in the median of the turns.

        NaN where a turn was too short to be counted: processor time comes in steps of 10 ms.
        """
        if not all(map(of, self.beside_plain)):
            return math.nan
        pairs = zip(self.beside_plain, self.beside_worst, strict=True)
        return median(of(worst) / of(plain) - 1 for plain, worst in pairs)

    @property
    def table(self) -> str:
        lines = [f"{'the neighbour':<22}{'ms a token':>12}{'CPU ms a token':>16}"]
        for field in fields(self):
            paces = getattr(self, field.name)
            lines.append(
                f"{field.name.replace('_', ' '):<22}"
                f"{1000 * median(pace.seconds for pace in paces):>12.2f}"
                f"{1000 * median(pace.cpu_seconds for pace in paces):>16.2f}"
            )
        seconds, cpu_seconds = self.cost(SECONDS_OF), self.cost(CPU_SECONDS_OF)
        return "\n".join([*lines, f"{'cost of worst':<22}{seconds:>12.1%}{cpu_seconds:>16.1%}"])


SECONDS_OF, CPU_SECONDS_OF = attrgetter("seconds"), attrgetter("cpu_seconds")


def measure(model: Path, n: int, num_tokens: int, turns: int) -> Decode:
    log = Path(tempfile.mkdtemp(prefix="neighbour-")) / "server.log"
    flags = ("--max-num-seqs", str(n + 1))
    with ServerProcess(model, flags, log) as server:
        server.wait_until_healthy()
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        body_of_worst = WORST | {"top_k": vocab_size - 1}
        biases = {str(token_id): 0.5 for token_id in range(min(MAX_LOGIT_BIASES, vocab_size))}
        plain = _other(n, num_tokens)
        bodies = (None, plain, {**plain, **body_of_worst, "logit_bias": biases})
        for body in bodies:
            _pace(server, body, 8)  # warm up
        found = [[_pace(server, body, num_tokens) for body in bodies] for _ in range(turns)]
    alone, plain, worst = (tuple(column) for column in zip(*found, strict=True))
    return Decode(alone, plain, worst)


def _other(n: int, num_tokens: int) -> dict[str, object]:
    """It runs from before the neighbour's first token until after its last."""
    length = {"max_tokens": 2 * num_tokens, "min_tokens": 2 * num_tokens}
    return {"prompt": PROMPT, "n": n, "seed": 1, "ignore_eos": True, **length}


def _pace(server: ServerProcess, other: dict[str, object] | None, num_tokens: int) -> Pace:
    """The pace of a neighbour of so many tokens; returns when `other` has ended, too."""
    url = server.base_url
    with httpx.Client(base_url=url, timeout=SECONDS) as client, ThreadPoolExecutor() as threads:
        asked = _started(threads, url, other)
        body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            answer.raise_for_status()
            lines = filter(None, answer.iter_lines())
            next(lines)
            begin, spent, num_told = time.perf_counter(), server_cpu_seconds(server.pid), 0
            for _ in lines:
                num_told += 1
            seconds = time.perf_counter() - begin
            cpu_seconds = server_cpu_seconds(server.pid) - spent
        if asked is not None:
            asked.result()
    return Pace(seconds / num_told, cpu_seconds / num_told)


def _started(
    threads: ThreadPoolExecutor, url: str, body: dict[str, object] | None
) -> Future[None] | None:
    """The other request, once it runs. Its result raises what went wrong with it."""
    if body is None:
        return None
    asked = threads.submit(_ask, f"{url}/v1/completions", {**body, "stream": True})
    while not asked.done() and httpx.get(f"{url}/load").json()["server_load"] == 0:
        time.sleep(0.001)
    return asked


def _ask(url: str, body: dict[str, object]) -> None:
    """Read a whole stream: its size has no bound, as that of an answer in one piece has."""
    with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
        text = "".join(answer.iter_text())
    if answer.status_code != 200 or '"error"' in text[-1000:]:
        raise SystemExit(f"the other request was answered {answer.status_code}: {text[-300:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="of 0.5B, made if it is not there; else the demo's model"
    )
    parser.add_argument("--n", type=int, default=15, help="choices of the other request")
    parser.add_argument("--tokens", type=int, default=100, help="of the neighbour's answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    model = ensure_checkpoint(args.checkpoint) if args.checkpoint else ensure_demo(print).model
    found = measure(model, args.n, args.tokens, args.turns)
    print(found.table)
    costs = {"cost": found.cost(SECONDS_OF), "cpu_cost": found.cost(CPU_SECONDS_OF)}
    write_facts(args.out, n=args.n, pace=found, **costs)


if __name__ == "__main__":
    main()
