"""What every Triton kernel takes of a card, compiled ahead of time: no card is needed.

    python -m benchmarks.gpu.triton_resources

compiles all that the models below launch, and the sampling of any, for sm_80 and sm_90, and writes
registers, spills, shared memory and what is read before a kernel waits to
benchmarks/results/triton-VERSION-resources.json, one kernel a line; with --check it compares with
what the same version of Triton gave, and fails on differences. A spill is a mistake in a tile's
shape.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.common.facts import write_json
from benchmarks.gpu.layer_launches import (
    MODELS,
    WORKS,
    ModelShape,
    Work,
    codes_launches,
    launches_of,
    sampling_launches,
)
from benchmarks.gpu.machine_code import touched_before_wait, waits
from lora_serve.ops.triton.launch import A100, H200, Launch, Machine

RESULTS = Path(__file__).parents[1] / "results"
NEVER_WAITS = "never waits"
ANY_MODEL = "any"
CODES = "codes"
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes: registers and spill_bytes a thread, shared_bytes a program.

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


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for a card of that capability. The result's model and work are left empty."""
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
    """The source as at run time: the compiler knows of most addresses that 16 divides them."""
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
    """Pointers by their first byte among the parameters, each at a multiple of its size."""
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
    """Compile each kernel with each set of constants once for each model and machine."""
    for model in models:
        for machine in machines:
            seen: set[tuple[object, ...]] = set()
            for work in works:
                for found in _compile_new(launches_of(model, work, machine), machine, seen):
                    yield replace(found, model=model.name, work=work.name)


def compile_codes(machines: Sequence[Machine], works: Sequence[Work]) -> Iterator[Resources]:
    """Compile linear layers and experts over codes once for each machine."""
    for machine in machines:
        seen: set[tuple[object, ...]] = set()
        for work in works:
            for found in _compile_new(codes_launches(work, machine), machine, seen):
                yield replace(found, model=CODES, work=work.name)


def compile_sampling(machines: Sequence[Machine]) -> Iterator[Resources]:
    """Compile what sampling launches, which is the same for all models."""
    for machine in machines:
        for found in _compile_new(sampling_launches(machine), machine, set()):
            yield replace(found, model=ANY_MODEL, work="sampling of 32")


def _compile_new(
    launches: Sequence[Launch], machine: Machine, seen: set[tuple[object, ...]]
) -> Iterator[Resources]:
    """Compile the launches of variants that are not in `seen`, and add these to it."""
    for launch in launches:
        if launch.variant not in seen and 0 not in launch.grid:
            seen.add(launch.variant)
            yield compile_launch(launch, machine.capability)


def record_path(version: str) -> Path:
    """Each version of Triton compiles in its own way, so each has its own record."""
    return RESULTS / f"triton-{version}-resources.json"


def read_record(path: Path) -> list[Resources]:
    """The kernels that `write_record` wrote."""
    record = json.loads(path.read_text())
    columns = record["columns"]
    return [Resources(**dict(zip(columns, row, strict=True))) for row in record["kernels"]]


def write_record(path: Path, found: Sequence[Resources]) -> None:
    """Write each kernel once, though several sets of constants may take the same of a card."""
    columns = [field.name for field in fields(Resources)]
    rows = list(dict.fromkeys(astuple(resources) for resources in found))
    write_json(path, {"triton": triton.__version__, "columns": columns, "kernels": rows})


def faults(found: Sequence[Resources], recorded: Sequence[Resources]) -> list[str]:
    """What spills, and what differs from what the same version of Triton gave."""
    told = [f"{r.model}, {r.work}: {r.kernel} spills {r.spill_bytes} bytes on sm_{r.capability}"
            for r in found if r.spill_bytes]  # fmt: skip
    # What several works launch stands there once, under the first of those that were compiled.
    known = {replace(resources, work="") for resources in recorded}
    return told + [f"not in the record: {r}" for r in found if replace(r, work="") not in known]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the record, not write")
    names = [*(model.name for model in MODELS), CODES, ANY_MODEL]
    parser.add_argument("--models", nargs="*", default=names, choices=names)
    parser.add_argument("--works", nargs="*", default=[work.name for work in WORKS])
    parser.add_argument("--capabilities", nargs="*", type=int, default=[80, 90])
    chosen = parser.parse_args()
    path = record_path(triton.__version__)
    if chosen.check and not path.is_file():
        sys.exit(f"{path} is not there: run this without --check, and read what it wrote")
    found = []
    machines = [machine for machine in (A100, H200) if machine.capability in chosen.capabilities]
    works = [work for work in WORKS if work.name in chosen.works]
    compiled = compile_all(
        [model for model in MODELS if model.name in chosen.models],
        machines,
        works,
    )
    codes = compile_codes(machines if CODES in chosen.models else (), works)
    sampling = compile_sampling(machines if ANY_MODEL in chosen.models else ())
    for resources in chain(compiled, codes, sampling):
        found.append(resources)
        print(resources, file=sys.stderr, flush=True)
    if chosen.check:
        sys.exit("\n".join(faults(found, read_record(path))) or None)
    write_record(path, found)


if __name__ == "__main__":
    main()
