"""What gathers would cost on machines that are not here, from bytes that are counted here.

`python -m benchmarks.speed.ranks_on_paper` runs one rank of a small model on real kernels beside
ranks that only seem to be there, counts what it would receive of them, and holds that against
`received_bytes`, which then tells of large models. What machines do in a second is assumed, above.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import ModelShape, ensure_checkpoint
from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.config.parallel import REDUCES, SEGMENTS, WHOLE_ROWS, Reduce
from lora_serve.distributed.group import ROOT, own_columns
from lora_serve.identity import BASE_MODEL
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import AskedOutputs, SampleInput, ScheduledRequest, SchedulerOutput
from lora_serve.worker.worker import Worker

VALUE_BYTES = 2  # bfloat16
BLOCK_SIZE = 16
LLAMA_8B = ModelShape(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
)
LLAMA_70B = ModelShape(
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
)
SMALL = ModelShape(
    hidden_size=128,
    intermediate_size=200,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=16,
    vocab_size=1024,
    max_position_embeddings=256,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What each of some ranks is assumed to do in a second: bytes, and operations of products.

    link_bytes: that it receives of the others. gather_seconds: of a gather of few bytes.
    """

    name: str
    num_ranks: int
    link_bytes: float
    memory_bytes: float
    operations: float
    gather_seconds: float = 10e-6


SOCKETS = Machine(
    name="two sockets", num_ranks=2, link_bytes=20e9, memory_bytes=200e9, operations=2e12
)
H200S = Machine(
    name="eight H200", num_ranks=8, link_bytes=450e9, memory_bytes=4.8e12, operations=600e12
)
CASES = (
    (SOCKETS, "Llama 3 8B", LLAMA_8B, 512),
    (H200S, "Llama 3 70B", LLAMA_70B, 2048),
)


@dataclass(frozen=True, slots=True)
class Counted:
    """What one rank receives in a step: gathers, and bytes that it had not computed itself."""

    num_gathers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OnPaper:
    """One machine and model; milliseconds.

    summing: of what --tensor-parallel-reduce segments, or all-reduce, has in the place of gathers.
    """

    what: str
    bytes_per_token: int
    chunk_tokens: int
    chunk_bytes: int
    chunk_gathering: float
    chunk_summing: float
    chunk_computing: float
    decode_gathers: int
    decode_gathering: float
    decode_reading: float


class CountingGroup:
    """The first of some ranks; each of the others gives what this one gives."""

    rank = ROOT

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_gathers = self.num_bytes = 0

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        self.num_gathers += 1
        self.num_bytes += whole.nbytes - part.nbytes
        begin = 0
        for width in widths:
            whole[:, begin : begin + width] = part[:, :width]
            begin += width

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        self.num_gathers += 1
        self.num_bytes += parts.nbytes - parts[0].nbytes
        parts[:] = own_columns(rows, shares[self.rank])

    def common_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def close(self) -> None:
        return None

    def counted(self) -> Counted:
        """What was gathered since the last call."""
        counted = Counted(self.num_gathers, self.num_bytes)
        self.num_gathers = self.num_bytes = 0
        return counted


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args(argv)
    for num_ranks in (2, 4, 8):
        for reduce in (WHOLE_ROWS, REDUCES[SEGMENTS](num_ranks)):
            check(num_ranks, reduce)
    rows = [on_paper(*case) for case in CASES]
    print(table(rows))
    write_facts(args.out, machines=[asdict(machine) for machine, *_ in CASES], rows=rows)


def table(rows: Sequence[OnPaper]) -> str:
    """The table of docs/tensor-parallel.md."""
    columns = [[row.what for row in rows], *zip(*map(_cells, rows), strict=True)]
    lines = [
        f"| {name} | {' | '.join(cells)} |" for name, cells in zip(_NAMES, columns, strict=True)
    ]
    return "\n".join([lines[0], "|---" + "|--:" * len(rows) + "|", *lines[1:]])


_NAMES = (
    *("", "gathered per token", "chunk of a prompt", "each rank receives", "which takes"),
    *("in segments it takes", "computing takes", "decode of one: gathers", "which take"),
    "reading the weights takes",
)


def _cells(row: OnPaper) -> list[str]:
    return [
        f"{row.bytes_per_token / 1e6:.1f} MB",
        f"{row.chunk_tokens} tokens",
        f"{row.chunk_bytes / 1e9:.2f} GB",
        f"{row.chunk_gathering:.0f} ms",
        f"{row.chunk_summing:.0f} ms",
        f"{row.chunk_computing:.0f} ms",
        str(row.decode_gathers),
        f"{row.decode_gathering:.1f} ms",
        f"{row.decode_reading:.1f} ms",
    ]


def on_paper(machine: Machine, model: str, shape: ModelShape, tokens: int) -> OnPaper:
    """A chunk of a prompt whose last row is sampled, and the decode of one request."""
    chunk, decode = (received(shape, machine.num_ranks, count) for count in (tokens, 1))
    summed = received(shape, machine.num_ranks, tokens, in_segments=True)
    parameters = _num_parameters(shape)
    return OnPaper(
        what=f"{machine.name}, {model}",
        bytes_per_token=shape.num_hidden_layers
        * _layer_width(shape, in_segments=False)
        * VALUE_BYTES,
        chunk_tokens=tokens,
        chunk_bytes=chunk.num_bytes,
        chunk_gathering=1e3 * chunk.num_bytes / machine.link_bytes,
        chunk_summing=1e3 * summed.num_bytes / machine.link_bytes,
        chunk_computing=2e3 * parameters * tokens / machine.num_ranks / machine.operations,
        decode_gathers=decode.num_gathers,
        decode_gathering=1e3 * decode.num_gathers * machine.gather_seconds,
        decode_reading=1e3 * parameters * VALUE_BYTES / machine.num_ranks / machine.memory_bytes,
    )


def received(
    shape: ModelShape, num_ranks: int, tokens: int, *, in_segments: bool = False
) -> Counted:
    """What one rank receives in a step of `tokens` rows, the last of which is sampled."""
    layers, width = shape.num_hidden_layers, _layer_width(shape, in_segments)
    # The last layer goes on with the sampled row alone.
    numbers = ((layers - 1) * width + shape.hidden_size) * tokens + width + shape.vocab_size
    exchanges = 2 if in_segments and num_ranks == 2 else 4  # of a layer
    return Counted(exchanges * layers + 2, numbers * VALUE_BYTES * (num_ranks - 1) // num_ranks)


def _layer_width(shape: ModelShape, in_segments: bool) -> int:
    """How many numbers of a token a layer gathers; each of two sums is handed on twice."""
    if in_segments:
        return 4 * shape.hidden_size
    return (
        shape.num_attention_heads * shape.head_dim + 2 * shape.hidden_size + shape.intermediate_size
    )


def _num_parameters(shape: ModelShape) -> int:
    """The parameters that are multiplied with."""
    of_layer = sum(outputs * inputs for outputs, inputs in shape.projections.values())
    return shape.num_hidden_layers * of_layer + shape.vocab_size * shape.hidden_size


# ── counting ────────────────────────────────────────────────────────────────────────────────


def check(num_ranks: int, reduce: Reduce = WHOLE_ROWS, shape: ModelShape = SMALL) -> None:
    """Hold `received` against what a rank on real kernels is given, in a chunk and in a decode."""
    group = CountingGroup(num_ranks)
    with tempfile.TemporaryDirectory(prefix="lora-serve-on-paper-") as name:
        worker = Worker(
            ModelConfig(
                model=str(ensure_checkpoint(Path(name) / "model", shape)),
                dtype="bfloat16",
                cpu_threads=1,
            ),
            CacheConfig(num_gpu_blocks_override=16),
            LoRAConfig(),
            max_num_seqs=1,
            max_num_batched_tokens=64,
            group=group,
            reduce=reduce,
        )
        worker.load()
    for start, tokens in ((0, 40), (40, 1)):
        group.counted()
        worker.submit(SchedulerOutput(0, (_request(start, tokens),)))
        worker.collect()
        counted = group.counted()
        expected = received(shape, num_ranks, tokens, in_segments=reduce.adds_segments)
        assert counted == expected, f"{num_ranks} ranks, {tokens} tokens: {counted}, {expected}"


def _request(start: int, tokens: int) -> ScheduledRequest:
    end = start + tokens
    sample = SampleInput(SamplingParams(temperature=0.8), seed=0, position=end)
    blocks = list(range(math.ceil(end / BLOCK_SIZE)))
    return ScheduledRequest(
        "counted", BASE_MODEL, start, [5] * tokens, [blocks], AskedOutputs((sample,))
    )


if __name__ == "__main__":
    main()
