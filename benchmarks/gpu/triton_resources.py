"""What every Triton kernel takes of a card, compiled ahead of time: no card is needed.

    python -m benchmarks.gpu.triton_resources

compiles all that the models below launch, and the sampling of any, for sm_80 and sm_90, and writes
registers, spills, shared memory and what is read before a kernel waits to
benchmarks/results/triton-VERSION-resources.json and .md; with --check it compares with what the
same version of Triton gave, and fails on differences. The launches are those that the `Ops` record
makes: it is called with tensors that have shapes and no memory, and its launches are compiled
instead of run. A spill is a mistake in a tile's shape.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.machine_code import touched_before_wait, waits
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.triton.backend import TritonKernels
from lora_serve.ops.triton.launch import A100, H200, Launch, Launcher, Machine
from lora_serve.sampling.triton.sampler import TritonSampler
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

RESULTS = Path(__file__).parents[1] / "results"
META = torch.device("meta")
BLOCK_SIZE = 16
NEVER_WAITS = "never waits"
ANY_MODEL = "any"
VOCAB_SIZE = 151_936
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder's facts that kernels are shaped by. is_gemma: its activation and wide norms."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    is_gemma: bool = False


MODELS = (
    ModelShape("0.5B", 896, 4864, 14, 2, 64),
    ModelShape("3B", 2048, 11008, 16, 2, 128),
    ModelShape("7B", 3584, 18944, 28, 4, 128),
    ModelShape("heads of 96", 3072, 8192, 32, 32, 96, window=2048),
    ModelShape("heads of 256", 2048, 16384, 8, 4, 256, window=4096),
    ModelShape("Gemma 2", 2304, 9216, 8, 4, 256, window=4096, softcap=50.0, is_gemma=True),
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel. spill_bytes: of local memory, per thread. shared_bytes: per program.

    instruction: the tensor core's, "" where it has none; its rows and steps decide a sum's bits.
    before_wait: the parameters that lead to what is read before the kernels before it have ended.
    """

    model: str
    work: str
    kernel: str
    capability: int
    num_warps: int
    num_stages: int
    tile: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instruction: str
    before_wait: str


@dataclass(frozen=True, slots=True)
class Work:
    """rows and requests of a step; captured: through a plan of fixed address."""

    name: str
    num_rows: int
    num_requests: int
    context: int
    is_captured: bool = False


WORKS = (
    Work("decode of 32", 32, 32, 2048),
    Work("captured decode of 256", 256, 256, 2048, is_captured=True),
    Work("prefill of 8192", 8192, 1, 8192),
)


def launches_of(model: ModelShape, work: Work, machine: Machine) -> list[Launch]:
    """One decoder layer's."""
    launches: list[Launch] = []
    kernels = TritonKernels(META, machine, batch_invariant=True, run=launches.append)
    _run_layer(kernels.ops(), model, work)
    return launches


def _run_layer(ops: Ops, model: ModelShape, work: Work) -> None:
    def empty(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    head, hidden, inner = model.head_size, model.hidden_size, model.intermediate_size
    shapes = (
        (sum(heads) * head, hidden),
        (hidden, heads[0] * head),
        (2 * inner, hidden),
        (hidden, inner),
    )
    lora = _plan_lora(ops, shapes, work, model.dtype)
    norm_dtype = torch.float32 if model.is_gemma else model.dtype
    norm_weight = empty(hidden, dtype=norm_dtype)
    residual = ops.rowwise.add_rms_norm(
        empty(work.num_rows, hidden), empty(work.num_rows, hidden), norm_weight, 1e-6
    )
    for index, (out_features, in_features) in enumerate(shapes):
        bias = empty(out_features) if index == 0 else None
        x = empty(work.num_rows, in_features)
        y = ops.linears.linear(x, ops.linears.pack_linear(empty(out_features, in_features), bias))
        ops.adapters.lora(y, x, lora, index)
    q, k, v = empty(work.num_rows, sum(heads), head).split(heads, dim=1)
    ops.rowwise.rms_norm(q, empty(head, dtype=norm_dtype), 1e-6)
    cache = ops.attention.new_kv_cache(4096, BLOCK_SIZE, model.num_kv_heads, head, model.dtype)
    rows = empty(work.num_rows, dtype=torch.int64)
    ops.attention.rotary_and_write_kv(
        q, k, v, empty(work.context, head, dtype=torch.float32), rows, cache, rows
    )
    plan = _plan_attention(ops, work)
    ops.attention.paged_attention(q, cache, plan, head**-0.5, model.window, model.softcap)
    gate = ops.rowwise.gelu_tanh_and_mul if model.is_gemma else ops.rowwise.silu_and_mul
    gate(empty(residual.shape[0], 2 * inner))
    if model.is_gemma:
        ops.rowwise.embed(empty(1000, hidden), rows, hidden**0.5)
        ops.rowwise.soft_cap(empty(work.num_requests, 1000), 30.0)


def _plan_lora(
    ops: Ops, shapes: Sequence[tuple[int, int]], work: Work, dtype: torch.dtype
) -> object:
    if work.is_captured:
        assert ops.graph_plans is not None
        return ops.graph_plans.new_lora_plan(work.num_rows)
    parts = [
        [LoRAPart(torch.empty(16, n, dtype=dtype), torch.empty(m, 16, dtype=dtype), 1.0, 0)]
        for m, n in shapes
    ]
    rows = work.num_rows // work.num_requests
    adapter = ops.adapters.pack_adapter(parts)
    segments = [(i * rows, (i + 1) * rows, adapter) for i in range(work.num_requests)]
    return ops.adapters.plan_lora(segments, work.num_rows)


def _plan_attention(ops: Ops, work: Work) -> object:
    max_blocks = work.context // BLOCK_SIZE
    if work.is_captured:
        assert ops.graph_plans is not None
        return ops.graph_plans.new_attention_plan(work.num_rows, max_blocks, BLOCK_SIZE, True)
    starts = torch.linspace(0, work.num_rows, work.num_requests + 1).int()
    lengths = torch.full((work.num_requests,), work.context, dtype=torch.int32)
    tables = torch.zeros(work.num_requests, max_blocks, dtype=torch.int32)
    return ops.attention.plan_attention(starts, lengths, tables, BLOCK_SIZE)


def compile_launch(launch: Launch, capability: int) -> Resources:
    """For a card of that capability. Of the result, model and work are left empty."""
    source = _source(launch)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    registers, spill_bytes = _usage(compiled.asm["cubin"])
    listing = _cuobjdump(compiled.asm["cubin"], "-sass")
    return Resources(
        model="",
        work="",
        kernel=launch.kernel.__name__,
        capability=capability,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        tile=_tile(launch),
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        instruction=_instruction(compiled.asm["ptx"]),
        before_wait=_before_wait(listing, source.signature),
    )


def _source(launch: Launch) -> ASTSource:
    """As at run time: of most addresses the compiler knows that 16 divides them."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for position, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name], constants[name] = "constexpr", launch.constants[name]
            continue
        value = launch.arguments[name]
        if isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if name not in launch.kernel.unaligned:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else _integer_type(value)
    return ASTSource(launch.kernel, signature, constants, attributes)


def _integer_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, per thread."""
    told = _cuobjdump(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    assert found, f"cuobjdump said {told}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _cuobjdump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _before_wait(listing: str, signature: Mapping[str, str]) -> str:
    if not waits(listing):
        return NEVER_WAITS
    return ", ".join(sorted(touched_before_wait(listing, _pointers(signature))))


def _pointers(signature: Mapping[str, str]) -> dict[int, str]:
    """By their first byte among the parameters, each of which begins at a multiple of its size."""
    found, end = {}, 0
    for name, kind in signature.items():
        if kind != "constexpr":
            size = 8 if kind.startswith("*") or kind == "i64" else 4
            begin = -(-end // size) * size
            end = begin + size
            if kind.startswith("*"):
                found[begin] = name
    return found


def _instruction(ptx: str) -> str:
    wide = set(
        re.findall(
            r"wgmma\.mma_async\.sync\.aligned\.(m\d+)n\d+(k\d+)[.\w]*?(bf16|f16|tf32)\.", ptx
        )
    )
    narrow = set(
        re.findall(r"mma\.sync\.aligned\.(m\d+)n\d+(k\d+)\.row\.col\.f32\.(bf16|f16|tf32)", ptx)
    )
    names = [f"wgmma {m}{k} {kind}" for m, k, kind in sorted(wide)]
    return ", ".join(names + [f"mma {m}{k} {kind}" for m, k, kind in sorted(narrow)])


def _tile(launch: Launch) -> str:
    names = ("ROWS", "KEYS", "OUTS", "OUT_BLOCK", "COLUMNS", "HEAD", "WIDTH")
    constants = launch.constants
    return " ".join(f"{name.lower()} {constants[name]}" for name in names if name in constants)


def compile_all(
    models: Sequence[ModelShape], machines: Sequence[Machine], works: Sequence[Work]
) -> Iterator[Resources]:
    """Each kernel with each set of constants once for each model and machine."""
    for model in models:
        for machine in machines:
            seen: set[tuple[object, ...]] = set()
            for work in works:
                for found in _compile_new(launches_of(model, work, machine), machine, seen):
                    yield replace(found, model=model.name, work=work.name)


def compile_sampling(machines: Sequence[Machine]) -> Iterator[Resources]:
    """With all filters, of the largest vocabulary of the models."""
    for machine in machines:
        for found in _compile_new(_sampling_launches(machine), machine, set()):
            yield replace(found, model=ANY_MODEL, work="sampling of 32")


def _sampling_launches(machine: Machine) -> list[Launch]:
    launches: list[Launch] = []
    sampler = TritonSampler(Launcher(machine, launches.append))
    logits = torch.empty(32, VOCAB_SIZE, dtype=torch.bfloat16, device=META)
    inputs = [SampleInput(SamplingParams(top_k=20, top_p=0.8), seed=0, position=0)] * 32
    sampler.sample(logits, inputs)
    return launches


def _compile_new(
    launches: Sequence[Launch], machine: Machine, seen: set[tuple[object, ...]]
) -> Iterator[Resources]:
    """Those of variants that were not seen, which they are now."""
    for launch in launches:
        if launch.variant not in seen and 0 not in launch.grid:
            seen.add(launch.variant)
            yield compile_launch(launch, machine.capability)


def record_path(version: str) -> Path:
    """Each version of Triton compiles in its own way, so each has its own record."""
    return RESULTS / f"triton-{version}-resources.json"


def faults(found: Sequence[Resources], record: Mapping[str, Any]) -> list[str]:
    """What spills, and what differs from a record of the same version of Triton."""
    told = [f"{r.model}, {r.work}: {r.kernel} spills {r.spill_bytes} bytes on sm_{r.capability}"
            for r in found if r.spill_bytes]  # fmt: skip
    # What several works launch stands there once, under the first of those that were compiled.
    recorded = [Resources(**{**entry, "work": ""}) for entry in record["kernels"]]
    return told + [f"not in the record: {r}" for r in found if replace(r, work="") not in recorded]


def page(record: Mapping[str, Any]) -> str:
    """The record as a table to read."""
    columns = [field.name for field in fields(Resources)]
    head = (
        "# What Triton's kernels take of a card\n\n"
        f"Compiled ahead of time by Triton {record['triton']}, without a card: "
        "`python -m benchmarks.gpu.triton_resources`. Registers and spilled bytes are a thread's, "
        "shared bytes a program's.\n\n"
    )
    rows = [columns, ["---"] * len(columns)]
    rows += [[str(entry[name]) for name in columns] for entry in record["kernels"]]
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the record, not write")
    names = [*(model.name for model in MODELS), ANY_MODEL]
    parser.add_argument("--models", nargs="*", default=names, choices=names)
    parser.add_argument("--works", nargs="*", default=[work.name for work in WORKS])
    parser.add_argument("--capabilities", nargs="*", type=int, default=[80, 90])
    chosen = parser.parse_args()
    path = record_path(triton.__version__)
    if chosen.check and not path.is_file():
        sys.exit(f"{path} is not there: run this without --check, and read what it wrote")
    found = []
    machines = [machine for machine in (A100, H200) if machine.capability in chosen.capabilities]
    compiled = compile_all(
        [model for model in MODELS if model.name in chosen.models],
        machines,
        [work for work in WORKS if work.name in chosen.works],
    )
    sampling = compile_sampling(machines if ANY_MODEL in chosen.models else ())
    for resources in chain(compiled, sampling):
        found.append(resources)
        print(resources, file=sys.stderr, flush=True)
    if chosen.check:
        sys.exit("\n".join(faults(found, json.loads(path.read_text()))) or None)
    record = {"triton": triton.__version__, "kernels": [asdict(resources) for resources in found]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
