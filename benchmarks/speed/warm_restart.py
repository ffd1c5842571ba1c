"""python -m benchmarks.speed.warm_restart: what tiers save after a restart, and what storing costs.

The engine runs in this process, over a disk path of its own. Warm: a new engine is asked for a
prompt whose KV the one before stored; the files may still be in the page cache, as after a restart
of the server alone. Storing: the same work with the disk tier and without, in turns, best of each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.common.busy import busy_cores
from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ensure_checkpoint
from lora_serve.llm import LLM
from lora_serve.observability.table import text_table
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

MODEL = Path("~/.cache/lora-serve/bench/model").expanduser()
PREFILL_TOKENS = 1024
NUM_DECODING, DECODED_TOKENS = 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Seconds to the first token of num_tokens, of which num_found were found on disk."""

    num_tokens: int
    num_found: int
    cold_seconds: float
    warm_seconds: float

    def rows(self) -> list[tuple[str, str]]:
        return [
            (f"first token of {self.num_tokens:,}, cold", f"{self.cold_seconds * 1e3:,.0f} ms"),
            ("  after a restart, warm", f"{self.warm_seconds * 1e3:,.0f} ms"),
            ("  warm, of cold", f"{self.warm_seconds / self.cold_seconds:.1%}"),
            ("  prompt tokens found", f"{self.num_found / self.num_tokens:.1%}"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """Tokens per second without tiers (off), and storing to disk (on)."""

    prefill_off: float
    prefill_on: float
    decode_off: float
    decode_on: float

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("prefill, without storing", f"{self.prefill_off:,.0f} tok/s"),
            ("prefill, storing", f"{self.prefill_on:,.0f} tok/s"),
            ("  cost", f"{1 - self.prefill_on / self.prefill_off:.1%}"),
            (f"decode of {NUM_DECODING}, without storing", f"{self.decode_off:,.1f} tok/s"),
            (f"decode of {NUM_DECODING}, storing", f"{self.decode_on:,.1f} tok/s"),
            ("  cost", f"{1 - self.decode_on / self.decode_off:.1%}"),
        ]


class Bench:
    def __init__(self, model: Path, directory: Path, num_tokens: int, num_turns: int) -> None:
        self._model = model
        self._directory = directory
        self._random = Random(20_240_919)
        self._prompt = self._new_prompt(num_tokens)
        self._num_turns = num_turns

    def restart(self) -> Restart:
        """Two engines, one after the other."""
        asked = [self._start_and_ask() for _ in range(2)]
        (cold, cold_seconds), (warm, warm_seconds) = asked
        assert warm.outputs == cold.outputs, "another answer after the restart"
        return Restart(
            num_tokens=len(self._prompt.token_ids),
            num_found=warm.num_cached_by_tier["disk"],
            cold_seconds=cold_seconds,
            warm_seconds=warm_seconds,
        )

    def storing(self) -> Storing:
        """Two engines side by side, which take turns."""
        with self._engine() as off, self._engine(kv_disk_path=str(self._directory)) as on:
            for engine in (off, on):
                self._warm_up(engine)
            prefill = self._in_turns(self._prefill_rate, off, on)
            decode = self._in_turns(self._decode_rate, off, on)
        return Storing(
            prefill_off=prefill[0],
            prefill_on=prefill[1],
            decode_off=decode[0],
            decode_on=decode[1],
        )

    def _start_and_ask(self) -> tuple[RequestOutput, float]:
        with self._engine(kv_disk_path=str(self._directory)) as engine:
            self._warm_up(engine)
            return self._ask(engine)

    def _warm_up(self, engine: LLM) -> None:
        """The first work of an engine is slower, by the memory that it touches first."""
        self._seconds(engine, [self._new_prompt(64)], 4)

    def _engine(self, **tiers: str) -> LLM:
        return LLM(str(self._model), kv_load_deadline_ms=10_000, max_model_len=8192, **tiers)

    def _new_prompt(self, num_tokens: int) -> TokensPrompt:
        return TokensPrompt(tuple(self._random.randrange(1000, 100_000) for _ in range(num_tokens)))

    def _ask(self, engine: LLM) -> tuple[RequestOutput, float]:
        """The first token of the long prompt, with its logprob."""
        start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        (output,) = engine.generate(self._prompt, params)
        return output, time.perf_counter() - start

    def _in_turns(self, measure: Callable[[LLM], float], off: LLM, on: LLM) -> tuple[float, float]:
        rates = [(measure(off), measure(on)) for _ in range(self._num_turns)]
        return max(rate for rate, _ in rates), max(rate for _, rate in rates)

    def _prefill_rate(self, engine: LLM) -> float:
        return PREFILL_TOKENS / self._seconds(engine, [self._new_prompt(PREFILL_TOKENS)], 1)

    def _decode_rate(self, engine: LLM) -> float:
        prompts = [self._new_prompt(32) for _ in range(NUM_DECODING)]
        return NUM_DECODING * DECODED_TOKENS / self._seconds(engine, prompts, DECODED_TOKENS)

    def _seconds(self, engine: LLM, prompts: Sequence[TokensPrompt], max_tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(
            prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("restart", "storing"))
    parser.add_argument("--model", type=Path, default=MODEL, help="Made if it is not there.")
    parser.add_argument("--tokens", type=int, default=4000, help="Length of the long prompt.")
    parser.add_argument("--turns", type=int, default=3, help="Turns of each measure of storing.")
    parser.add_argument("--path", type=Path, help="A directory on the disk to store on.")
    parser.add_argument("--out", type=Path, help="Where to write the JSON.")
    arguments = parser.parse_args()
    ensure_checkpoint(arguments.model)
    busy = busy_cores()
    with tempfile.TemporaryDirectory(dir=arguments.path) as directory:
        bench = Bench(arguments.model, Path(directory), arguments.tokens, arguments.turns)
        figures = bench.restart() if arguments.part == "restart" else bench.storing()
    print(text_table(("", ""), figures.rows()))
    write_facts(arguments.out, busy_cores_before=busy, figures=figures)


if __name__ == "__main__":
    main()
