"""python -m benchmarks.gpu.host_time: what the host does for each decode step of the GPU engine.

While a card computes a step, the host must plan, build and hand over the next one and report the
one before, or the card waits. This is the time of all that, by part, on a machine without a card:
scheduler, worker, batch, plans of the Triton kernels, sampling and replies are those that serve,
and what would run on a card does nothing. So left out are CUDA's own calls (a graph's replay, the
launches of the LM head and of sampling, copies through pinned memory, events) but for torch's calls
on the CPU that stand in their place, and the socket to the API process, which the bytes are made
for. The model has 28 layers, as the 7B shape; widths, which the host's work does not depend on, are
tiny, and so is the vocabulary, since torch changes the logits that penalties ask for; these, whose
work on the host grows with the distinct tokens of a request, find few of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from unittest import mock

import msgspec
import torch

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ModelShape
from benchmarks.gpu.engine import GREEDY, MeasuredEngine, Settings
from benchmarks.gpu.no_device import make_idle_worker
from benchmarks.gpu.shapes import model_config
from benchmarks.speed.overhead.stopwatch import Stopwatch
from lora_serve.engine.core.process import spare_long_collections
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.step_graphs import GraphBuffers
from lora_serve.worker.worker import Worker

SHAPE = ModelShape(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=28,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=16,
    max_position_embeddings=65_536,
)
BLOCK_SIZE = 16
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.8)
# As generation_config.json of Qwen2.5-7B-Instruct asks for it.
PENALISED = msgspec.structs.replace(
    GREEDY, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
)
SAMPLING = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}
# So many tokens see each request begin a new block once.
TOKENS_OF_A_TURN = BLOCK_SIZE
MORE_TOKENS = 1024  # of a request's answer, beyond its prompt
PREFILLED_AT_ONCE = 65_536

PARTS: dict[str, tuple[type, str]] = {
    "schedule": (Scheduler, "schedule"),
    "submit": (Worker, "submit"),
    "lay out": (BatchBuilder, "lay_out"),
    "fill": (GraphBuffers, "fill"),
    "take in": (Scheduler, "update_from_output"),
}
COLUMNS = ("schedule", "lay out", "fill", "hand over", "take in", "tell")
HEAD = "| context | requests | adapters | tokens | step, ms | " + " | ".join(COLUMNS) + " |"
RULE = "|--:" * 3 + "|---" + "|--:" * (1 + len(COLUMNS)) + "|"


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of the host for a token of each request, all and by part, of the median turn.

    tokens: how they are chosen.
    parts: "lay out" makes rows and tables of the step's requests, "fill" copies them into a
        recorded step's buffers and plans, "hand over" is what else the worker does to submit,
        sampling included. "take in" is the scheduler's part in what came out, "tell" the way from
        there to the bytes of the replies, and all that is in no other part.
    """

    context: int
    num_requests: int
    num_adapters: int
    tokens: str
    step: float
    parts: dict[str, float]


def measure(contexts: Sequence[int], requests: Sequence[int], num_turns: int) -> Iterator[Row]:
    """Time steps by context and requests, with and without adapters, by choices of tokens."""
    with tempfile.TemporaryDirectory() as directory:
        for context in contexts:
            engine = _engine(Path(directory), context, max(requests))
            try:
                for n in requests:
                    yield _measured(engine, context, n, n, "greedy", num_turns)
                    for tokens in SAMPLING:
                        yield _measured(engine, context, n, 0, tokens, num_turns)
            finally:
                engine.close()


def _engine(directory: Path, context: int, max_requests: int) -> MeasuredEngine:
    config = {**model_config("tiny"), **asdict(SHAPE)}
    (directory / "config.json").write_text(json.dumps(config))
    max_model_len = context + MORE_TOKENS
    settings = Settings(
        device="cpu",
        max_num_seqs=max_requests,
        max_num_batched_tokens=PREFILLED_AT_ONCE,
        max_model_len=max_model_len,
        max_adapters=max_requests,
        num_blocks=max_requests * -(-max_model_len // BLOCK_SIZE),
    )
    return MeasuredEngine(directory, SHAPE, settings, make_idle_worker)


def _measured(
    engine: MeasuredEngine,
    context: int,
    num_requests: int,
    num_adapters: int,
    tokens: str,
    num_turns: int,
) -> Row:
    num_steps = num_turns * TOKENS_OF_A_TURN
    case = (num_requests, num_adapters, context, num_steps, SAMPLING[tokens])
    with engine.decoding(*case), _timed() as watch:
        turns = [_turn(engine, num_requests, watch) for _ in range(num_turns)]
    median = sorted(turns, key=itemgetter("step"))[num_turns // 2]
    step = median.pop("step")
    return Row(context, num_requests, num_adapters, tokens, step, median)


@contextmanager
def _timed() -> Iterator[Stopwatch]:
    """While every call of the parts is noted, of any engine."""
    watch = Stopwatch()
    with ExitStack() as patches:
        for part, (owner, name) in PARTS.items():
            timed = watch.timed(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, timed))
        yield watch


def _turn(engine: MeasuredEngine, num_requests: int, watch: Stopwatch) -> dict[str, float]:
    """Mean milliseconds for a token of each request, and of its parts, which add up to them."""
    watch.take()
    step, until = 0.0, engine.num_generated_tokens + num_requests * TOKENS_OF_A_TURN
    while engine.num_generated_tokens < until:
        step += engine.step()
    parts = watch.take()
    submit, seconds = parts.pop("submit"), {"step": step, **parts}
    seconds["hand over"] = submit - parts["lay out"] - parts["fill"]
    seconds["tell"] = step - submit - parts["schedule"] - parts["take in"]
    return {part: 1e3 * time / TOKENS_OF_A_TURN for part, time in seconds.items()}


def table_line(row: Row) -> str:
    times = [row.step, *(row.parts[column] for column in COLUMNS)]
    cells = [f"{row.context:,}", row.num_requests, row.num_adapters, row.tokens]
    return f"| {' | '.join([*map(str, cells), *(f'{time:.2f}' for time in times)])} |"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 32_768])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--turns", type=int, default=5, help=f"of {TOKENS_OF_A_TURN} tokens each")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parse_arguments(arguments)
    torch.set_num_threads(1)  # the engine's own thread is all that works
    rows = []
    print(HEAD, RULE, sep="\n", flush=True)
    spare_long_collections()  # as the engine's process does
    for row in measure(chosen.contexts, chosen.requests, chosen.turns):
        rows.append(row)
        print(table_line(row), flush=True)
    write_facts(chosen.out, shape=SHAPE, rows=rows)


if __name__ == "__main__":
    main()
