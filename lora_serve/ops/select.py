"""Which kernels this machine has, and which of them serve. A warning is logged for the slow ones.

The choice is the user's through `--override-op` and `--quantization`; nothing else changes it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from lora_serve.config.overrides import ALL_OPS, ROWWISE_OPS, backend_of, overridden_op
from lora_serve.errors import ConfigError
from lora_serve.ops.contract import (
    LinearKernels,
    Ops,
    PackedLinear,
    PackQuantized,
    RowwiseKernels,
)
from lora_serve.ops.quantization import Quantization
from lora_serve.ops.reference import REFERENCE

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

# The fields of `Ops` that `--override-op` swaps together, by what it names.
OP_GROUPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ROWWISE_OPS, ("rowwise",)),
    "linear": (
        *("linears", "experts", "pack_quantized", "pack_codes", "pack_screen"),
        "kept_packing",
    ),
    "lora": ("adapters", "plan_pairs"),
    "paged_attention": ("attention",),
    "sampling": ("runtime",),  # lora_serve.sampling.select finds the kernels by it
}


def available_ops(
    device: torch.device = CPU,
    batch_invariant: bool = False,
    pin_threads: bool = False,
    overlap_launches: bool = True,
) -> dict[str, Ops]:
    """Backends for a device by name.

    On CPUs "reference" always, "cpu" where the extension was built, and "triton" where its
    interpreter runs (TRITON_INTERPRET=1), for tests; on other devices "triton".
    """
    if device.type != "cpu":
        return {"triton": _load_triton(device, batch_invariant, overlap_launches)}
    backends = {"reference": REFERENCE}
    try:
        native = importlib.import_module("lora_serve.ops.cpu.backend")
        backends["cpu"] = native.load(pin=pin_threads)
    except ImportError as error:
        logger.debug("no native CPU kernels: %s", error)
    if os.environ.get("TRITON_INTERPRET") == "1":
        backends["triton"] = _load_triton(device, batch_invariant, overlap_launches)
    return backends


def _load_triton(device: torch.device, batch_invariant: bool, overlap_launches: bool) -> Ops:
    try:
        module = importlib.import_module("lora_serve.ops.triton.backend")
    except ImportError as error:
        raise ConfigError(
            f"--device {device}: its kernels need Triton, which cannot be imported ({error}); "
            "pip install 'lora-serve[cuda]'"
        ) from error
    ops: Ops = module.load(
        device, batch_invariant=batch_invariant, overlap_launches=overlap_launches
    )
    return ops


def choose_ops(
    overrides: Sequence[str],
    device: torch.device,
    batch_invariant: bool = False,
    pin_threads: bool = False,
    overlap_launches: bool = True,
) -> Ops:
    """The fastest backend of a device, with groups of kernels swapped as `--override-op` asks.

    Raises:
        ConfigError: for a group or backend that does not exist, or cannot be loaded.
    """
    backends = available_ops(device, batch_invariant, pin_threads, overlap_launches)
    if device.type != "cpu":
        return override_ops(backends["triton"], overrides, backends)
    if "cpu" not in backends:
        logger.warning(
            "lora-serve was installed without its native CPU kernels; the reference kernels in "
            "plain torch serve instead, many times slower. Install a C++ compiler and reinstall."
        )
    return override_ops(backends.get("cpu", REFERENCE), overrides, backends)


def override_ops(ops: Ops, overrides: Sequence[str], backends: dict[str, Ops]) -> Ops:
    """Swap groups of kernels as `--override-op GROUP=BACKEND` asks; the group "all" is every one.

    Raises:
        ConfigError: naming the group or backend that does not exist, and those that do; or a
            backend that works on another device.
    """
    for override in overrides:
        group, backend = overridden_op(override), backend_of(override)
        if backend not in backends:
            raise ConfigError(
                f"--override-op {override}: backend {backend!r} is not available; these are: "
                f"{sorted(backends)}"
                + (" (triton needs --device cuda or TRITON_INTERPRET=1)" * (backend == "triton"))
            )
        source = backends[backend]
        if source.device != ops.device:
            raise ConfigError(
                f"--override-op {override}: it works on {source.device}, the others on {ops.device}"
            )
        ops = source if group == ALL_OPS else _swap(ops, group, source)
    return ops


def _swap(ops: Ops, group: str, source: Ops) -> Ops:
    swapped: dict[str, Any] = {name: getattr(source, name) for name in OP_GROUPS[group]}
    if group in ROWWISE_OPS:
        swapped["rowwise"] = _swap_rowwise(ops.rowwise, group, source.rowwise)
    # Plans of two backends cannot be captured by the rules of one, nor their kernels be fused.
    swapped.update(graph_plans=None, record=None, fuse_gated=None)
    numerics = f"{ops.numerics},{group}={source.numerics}"
    return replace(ops, numerics=numerics, **swapped)


def _swap_rowwise(kernels: RowwiseKernels, name: str, source: RowwiseKernels) -> RowwiseKernels:
    """`kernels` but for the one of that name."""
    members = {op: getattr(source if op == name else kernels, op) for op in ROWWISE_OPS}
    return cast(RowwiseKernels, SimpleNamespace(**members))


@dataclass(frozen=True, slots=True)
class _QuantizedLinears:
    """Linear layers that quantise the weights they are given."""

    kernels: LinearKernels[PackedLinear]
    pack_quantized: PackQuantized[PackedLinear]
    quantization: Quantization

    def pack_linear(self, weight: Tensor, bias: Tensor | None, /) -> PackedLinear:
        how = self.quantization
        return self.pack_quantized(weight, how.weights, bias, how.activations)

    def pack_rows(self, weight: Tensor, /) -> PackedLinear:
        return self.kernels.pack_rows(weight)

    def linear(self, x: Tensor, packed: PackedLinear, /) -> Tensor:
        return self.kernels.linear(x, packed)


def quantize_linears(ops: Ops, quantization: Quantization) -> Ops:
    """`ops` with linear layers that quantise the weights they are given.

    Raises:
        ConfigError: when the backend of the linear layers has no kernels for that.
    """
    if ops.pack_quantized is None:
        raise ConfigError(
            f"--quantization {quantization.weights.name}: the {ops.name} kernels have no quantised "
            "linear layers; leave it out, or serve on the CPU"
        )
    linears = _QuantizedLinears(ops.linears, ops.pack_quantized, quantization)
    numerics = f"{ops.numerics},{quantization}"
    return replace(ops, numerics=numerics, linears=linears, pack_codes=None, pack_screen=None)


def machine_numerics(ops: Ops) -> str:
    """`ops.numerics`, and what else of this machine may change a bit of the results."""
    if "reference" not in ops.numerics:
        return ops.numerics
    threads = torch.get_num_threads()
    return f"{ops.numerics},torch={torch.__version__},threads={threads},bits={_sample_bits()}"


def _sample_bits() -> str:
    """Digest of a sum of a thousand terms, which differs between processors and math libraries."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(2, 16, 1000, generator=generator)
    linears = REFERENCE.linears
    bits = linears.linear(x, linears.pack_linear(weight, None)).view(torch.int32)
    return xxhash.xxh3_64_hexdigest(repr(bits.tolist()).encode())
