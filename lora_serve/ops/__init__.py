"""The kernels as one record: what a backend must write, and what can be swapped at run time.

Every kernel's meaning stands in plain torch in `ops/reference.py`; the others are tested against
it. The rule all of them keep: an output element is summed in an order that depends on absolute
position only, never on how many rows, which other rows, or which chunk it came with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, dtype

from lora_serve.errors import ConfigError
from lora_serve.ops.quantization import CodeFormat, Quantization

# What a backend makes for itself and only it looks into.
PackedLinear = Any
PackedAdapter = Any
LoRAPlan = Any
AttentionPlan = Any

# (N, H) -> of each row the first of its largest outputs, or -1 where that stays in question.
ScreenedArgmax = Callable[[Tensor], list[int]]


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """One projection's delta inside a (possibly fused) linear layer.

    y[:, out_start : out_start + b.shape[0]] += scale * (x @ a.T) @ b.T

    a: (rank, in_features), model dtype, contiguous. b: (out_features, rank), likewise.
    """

    a: Tensor
    b: Tensor
    scale: float
    out_start: int


class NotRecordableError(Exception):
    """A forward does something that a backend's recording would leave out; it says what."""


class RecordedWork(Protocol):
    """output: what was returned when it was recorded; each replay writes it anew."""

    output: Tensor

    def replay(self) -> None:
        """Do all of it again, on what the memory holds by then."""


@dataclass(frozen=True, slots=True)
class GraphPlans:
    """Plans at fixed addresses, for steps that are captured once and replayed.

    A captured plan is for exactly `num_rows` rows. It is made without any request: its kernels then
    read and write nothing of the KV cache and of adapters. `fill` makes its first rows those of the
    given requests and the rest padding again, by copies ordered on the current stream (the captured
    kernels see what was filled last), without waiting for the device. A captured kernel's grid
    depends on what the plan was made with alone. Padding rows have slot -1, which
    rotary_and_write_kv does not write, and sequence length 0, whose attention is 0.

    new_attention_plan(num_rows, max_blocks, block_size, is_decode) -> AttentionPlan. max_blocks: of
        one request. is_decode: every request has one row.
    fill_attention_plan(plan, query_start_loc (n+1), seq_lens (n), block_tables (n, any)): as of
        plan_attention.
    new_lora_plan(num_rows) -> LoRAPlan.
    fill_lora_plan(plan, segments): as of plan_lora; the caller keeps their adapters alive until
        the device has run the step.
    record(run) -> what Device.record gives, for a backend that notes its own calls, of decodes
        alone; None where the device records. Raises NotRecordableError.
    """

    new_attention_plan: Callable[[int, int, int, bool], AttentionPlan]
    fill_attention_plan: Callable[[AttentionPlan, Tensor, Tensor, Tensor], None]
    new_lora_plan: Callable[[int], LoRAPlan]
    fill_lora_plan: Callable[[LoRAPlan, Sequence[tuple[int, int, PackedAdapter]]], None]
    record: Callable[[Callable[[], Tensor]], RecordedWork] | None = None


@dataclass(frozen=True, slots=True)
class Runtime:
    """What runs a backend's kernels.

    launcher: of the backend's own type; None where its kernels need none.
    """

    backend: str
    launcher: object = None


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend's kernels. T tokens, R requests, H hidden, D head size, dtype the model's.

    name: as `--override-op` names the backend. numerics: changes whenever results may change in a
        bit; part of the model fingerprint.
    device: where the tensors of all calls live, except those that plans are made of: these are
        CPU tensors, and the backend brings to the device what its kernels need of them.
    embed(weight (V, H), input_ids (T), int64, scale or None) -> (T, H), newly allocated: the
        tokens' rows, as they are; or times scale, in float32, rounded once.
    pack_linear(weight (out, in), bias (out) or None) -> PackedLinear. May keep the weight itself.
    linear(x (T, in), packed) -> (T, out). Accumulates in float32, rounds once, after the bias.
    pack_quantized(weight, code_format, bias or None, quantize_activations) -> PackedLinear, for
        `linear`, of the codes and scales that ops/quantization.py has for the weight, to the bit.
        None where the backend has no kernels for that.
    pack_screen(weight (V, H), packed) -> ScreenedArgmax, which finds the largest outputs that
        `linear` gives with the packed weight without computing all; -1 for a row where too few
        could be left out. None where there can be none, or it does not pay.
    pack_adapter(linears) -> PackedAdapter. linears[i]: the LoRAParts of linear layer i.
    plan_lora(segments, num_tokens) -> LoRAPlan, once a step. segments: (start, end, PackedAdapter),
        disjoint row ranges in ascending order; rows outside them have no adapter.
    lora(y (T, out), x (T, in), plan, linear_index) adds every segment's delta to y, in place.
        The hidden x @ a.T stays float32; delta is added in float32 and y rounded once.
    rms_norm(x (N, D) or (T, heads, D), weight (D), eps) -> the same shape, contiguous. In float32,
        rounded once. A token's heads lie side by side, tokens at any stride. The weight is of x's
        dtype or float32, here and in add_rms_norm.
    add_rms_norm(x (T, H), residual (T, H), weight, eps) -> (T, H). residual += x in place, rounded
        to its dtype; returns rms_norm(residual).
    silu_and_mul(x (T, 2 I)) -> (T, I): silu(x[:, :I]) * x[:, I:], in float32, rounded once.
    gelu_tanh_and_mul(x (T, 2 I)) -> (T, I): the same with gelu in its form with tanh, gate / 2 *
        (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))), in the place of silu.
    soft_cap(logits (N, V), cap) -> the same tensor, whose numbers became cap * tanh(logits / cap),
        in float32, rounded once. Contiguous; cap is above 0.
    new_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype) -> one layer's cache; dim 0
        is the block, everything below it belongs to the backend (tiers move it as bytes).
    rotary_and_write_kv(q (T, Hq, D), k (T, Hkv, D), v (T, Hkv, D), cos_sin (P, D), positions (T),
        kv_cache, slot_mapping (T)) rotates q in place (neox halves; cos_sin[p] = cos half, sin
        half, float32) and writes rotated k, and v, to slots block_id * block_size + offset.
    plan_attention(query_start_loc (R+1), seq_lens (R), block_tables (R, max_blocks), block_size)
        -> AttentionPlan, once a step; int32 CPU tensors. Request r's queries are rows
        [query_start_loc[r], query_start_loc[r+1]), the last of seq_lens[r] positions.
    paged_attention(q (T, Hq, D), kv_cache, plan, scale, sliding_window or None, softcap or None)
        -> (T, Hq, D). Causal; query at position p sees [0, p], or (p - sliding_window, p]. Blocks
        that none of a request's queries sees may hold anything; those before a window need not be
        the request's. Scores are scale * q . k, or softcap * tanh(scale * q . k / softcap).
    runtime: for kernels of the backend outside this record.
    graph_plans: how plans live at fixed addresses; None where nothing is ever captured.
    """

    name: str
    numerics: str
    device: torch.device
    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    linear: Callable[[Tensor, PackedLinear], Tensor]
    pack_adapter: Callable[[Sequence[Sequence[LoRAPart]]], PackedAdapter]
    plan_lora: Callable[[Sequence[tuple[int, int, PackedAdapter]], int], LoRAPlan]
    lora: Callable[[Tensor, Tensor, LoRAPlan, int], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    soft_cap: Callable[[Tensor, float], Tensor]
    new_kv_cache: Callable[[int, int, int, int, dtype], Tensor]
    rotary_and_write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    plan_attention: Callable[[Tensor, Tensor, Tensor, int], AttentionPlan]
    paged_attention: Callable[
        [Tensor, Tensor, AttentionPlan, float, int | None, float | None], Tensor
    ]
    embed: Callable[[Tensor, Tensor, float | None], Tensor]
    graph_plans: GraphPlans | None = None
    pack_quantized: Callable[[Tensor, CodeFormat, Tensor | None, bool], PackedLinear] | None = None
    pack_screen: Callable[[Tensor, PackedLinear], ScreenedArgmax | None] | None = None
    runtime: Runtime = Runtime("reference")


# Kernels that share a private format can only be swapped together.
OP_GROUPS: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "linear": ("pack_linear", "pack_quantized", "linear", "pack_screen"),
    "lora": ("pack_adapter", "plan_lora", "lora"),
    "rms_norm": ("rms_norm",),
    "add_rms_norm": ("add_rms_norm",),
    "silu_and_mul": ("silu_and_mul",),
    "gelu_tanh_and_mul": ("gelu_tanh_and_mul",),
    "soft_cap": ("soft_cap",),
    "paged_attention": (
        "new_kv_cache",
        "rotary_and_write_kv",
        "plan_attention",
        "paged_attention",
    ),
    "sampling": ("runtime",),  # lora_serve.sampling.select finds the kernels by it
}


def overridden_group(override: str) -> str:
    """The group of kernels that GROUP=BACKEND is about.

    Raises:
        ConfigError: naming the group that does not exist, and those that do.
    """
    group = override.partition("=")[0]
    if group not in (*OP_GROUPS, "all"):
        raise ConfigError(
            f"--override-op {override}: no op {group!r}; have {sorted(OP_GROUPS)} and 'all'"
        )
    return group


def override_ops(ops: Ops, overrides: Sequence[str], backends: dict[str, Ops]) -> Ops:
    """Swap groups of kernels as `--override-op GROUP=BACKEND` asks; the group "all" is every one.

    Raises:
        ConfigError: naming the group or backend that does not exist, and those that do; or a
            backend that works on another device.
    """
    for override in overrides:
        group, backend = overridden_group(override), override.partition("=")[2]
        if backend not in backends:
            raise ConfigError(
                f"--override-op {override}: no backend {backend!r}; have {sorted(backends)}"
                + (" (triton needs --device cuda or TRITON_INTERPRET=1)" * (backend == "triton"))
            )
        source = backends[backend]
        if source.device != ops.device:
            raise ConfigError(
                f"--override-op {override}: it works on {source.device}, the others on {ops.device}"
            )
        if group == "all":
            ops = source
            continue
        swapped = {name: getattr(source, name) for name in OP_GROUPS[group]}
        numerics = f"{ops.numerics},{group}={source.numerics}"
        # Plans of two backends cannot be captured by the rules of one.
        ops = replace(ops, numerics=numerics, graph_plans=None, **swapped)
    assert {f.name for f in fields(Ops)} >= {n for names in OP_GROUPS.values() for n in names}
    return ops


def quantize_linears(ops: Ops, quantization: Quantization) -> Ops:
    """`ops` with linear layers that quantise the weights they are given.

    Raises:
        ConfigError: when the backend of the linear layers has no kernels for that.
    """
    pack_quantized = ops.pack_quantized
    if pack_quantized is None:
        raise ConfigError(
            f"--quantization {quantization.weights.name}: the {ops.name} kernels have no quantised "
            "linear layers; leave it out, or serve on the CPU"
        )

    def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack_quantized(weight, quantization.weights, bias, quantization.activations)

    numerics = f"{ops.numerics},{quantization}"
    return replace(ops, numerics=numerics, pack_linear=pack_linear, pack_screen=None)
