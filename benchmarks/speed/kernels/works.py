"""The kernels' work in serving Qwen2.5-0.5B: its layers, at the sizes that steps have.

H hidden, I intermediate, V vocabulary, Hq and Hkv heads of D. Weights lie in as many copies as it
takes for each call to read its own from memory, as in a model of many layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.speed.kernels.measure import in_turns, num_copies
from benchmarks.speed.kernels.work import Work
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.quantization import INT4, INT8, Quantization
from lora_serve.ops.select import quantize_linears

H, I, V = 896, 4864, 151_936  # noqa: E741
HQ, HKV, D = 14, 2, 64
QKV = (HQ + 2 * HKV) * D
BLOCK_SIZE = 16
SCALE_BYTES = 2  # of each group of codes


QUANTIZATIONS = (Quantization(INT8), Quantization(INT8, activations=True), Quantization(INT4))


def all_works(ops: Ops, dtype: torch.dtype) -> Iterator[Work]:
    yield from linear_works("linear", ops, dtype, dtype.itemsize)
    for quantization in QUANTIZATIONS:
        quantized, codes = quantize_linears(ops, quantization), quantization.weights
        yield from linear_works(
            f"linear {quantization}", quantized, dtype, codes.bits / 8 + SCALE_BYTES / codes.group
        )
    yield from expert_works(ops, dtype)
    yield from lora_works(ops, dtype)
    yield from attention_works(ops, dtype)
    yield from row_works(ops, dtype)


def linear_works(
    kind: str, ops: Ops, dtype: torch.dtype, bytes_per_weight: float
) -> Iterator[Work]:
    layers = {"q k v": (QKV, H), "o": (H, H), "gate up": (2 * I, H), "down": (H, I), "head": (V, H)}
    for name, (outputs, inputs) in layers.items():
        weight = torch.randn(outputs, inputs).to(dtype)
        num_bytes = bytes_per_weight * outputs * inputs
        copies = num_copies(num_bytes)
        packed = [ops.linears.pack_linear(weight, None) for _ in range(copies)]
        for rows in (1, 8, 32) if name == "head" else (1, 4, 8, 32, 128, 512, 2048):
            x = torch.randn(rows, inputs).to(dtype)
            yield Work(
                f"{kind} {name} ({inputs} to {outputs}), {rows} rows",
                in_turns([partial(ops.linears.linear, x, copy) for copy in packed]),
                2.0 * rows * outputs * inputs,
                num_bytes + dtype.itemsize * rows * (outputs + inputs),
            )


def expert_works(ops: Ops, dtype: torch.dtype) -> Iterator[Work]:
    """OLMoE's experts, as many as 64 rows choose; the bytes are those of the chosen ones alone."""
    hidden, inner, num_experts, num_chosen = 2048, 1024, 64, 8
    for name, (outputs, inputs) in {
        "gate up": (2 * inner, hidden),
        "down": (hidden, inner),
    }.items():
        weight = torch.randn(outputs, inputs).to(dtype)
        packed = ops.experts.pack_experts(
            [ops.linears.pack_linear(weight, None) for _ in range(num_experts)]
        )
        for rows in (1, 8, 128, 2048):
            # In turns, so that each call reads other experts from memory where there are few rows.
            chosen = [
                ops.experts.choose(torch.randn(rows, num_experts).to(dtype), num_chosen, False)
                for _ in range(8)
            ]
            num_read = sum(len(each.ids.unique()) for each in chosen) / len(chosen)
            x = torch.randn(rows, inputs).to(dtype)
            yield Work(
                f"experts {name} ({inputs} to {outputs}), {rows} rows",
                in_turns([partial(ops.experts.linear, x, packed, each) for each in chosen]),
                2.0 * rows * num_chosen * outputs * inputs,
                dtype.itemsize * (num_read * outputs * inputs + rows * num_chosen * outputs),
            )


def lora_works(ops: Ops, dtype: torch.dtype) -> Iterator[Work]:
    layers = {"q k v": (H, (HQ * D, HKV * D, HKV * D)), "gate up": (H, (I, I)), "down": (I, (H,))}
    for name, (inputs, outputs) in layers.items():
        for rank, rows, adapters in ((16, 1, 1), (16, 8, 1), (16, 8, 8), (64, 8, 8), (16, 1024, 1)):
            weights = rank * (len(outputs) * inputs + sum(outputs))
            copies = num_copies(adapters * weights * dtype.itemsize)
            linears = [lora_parts(inputs, outputs, rank, dtype)] * copies
            plan = ops.adapters.plan_lora(
                [
                    (
                        index * rows // adapters,
                        (index + 1) * rows // adapters,
                        ops.adapters.pack_adapter(linears),
                    )
                    for index in range(adapters)
                ],
                rows,
            )
            x = torch.randn(rows, inputs).to(dtype)
            y = torch.randn(rows, sum(outputs)).to(dtype)
            yield Work(
                f"lora {name}, rank {rank}, {rows} rows of {adapters} adapters",
                in_turns([partial(ops.adapters.lora, y, x, plan, copy) for copy in range(copies)]),
                2.0 * rows * weights,
                x.element_size() * (adapters * weights + x.numel() + 2 * y.numel()),
            )


def lora_parts(
    inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype
) -> list[LoRAPart]:
    starts = [sum(outputs[:i]) for i in range(len(outputs))]
    return [
        LoRAPart(torch.randn(rank, inputs).to(dtype), torch.randn(n, rank).to(dtype), 2.0, start)
        for n, start in zip(outputs, starts, strict=True)
    ]


def attention_works(ops: Ops, dtype: torch.dtype) -> Iterator[Work]:
    """(requests, new tokens of each, positions of each, first ones that all share)."""
    for requests, tokens, seq_len, shared in (
        (1, 1, 128, 0),
        (1, 1, 1024, 0),
        (1, 1, 8192, 0),
        (1, 1, 32_768, 0),
        (8, 1, 1024, 0),
        (8, 1, 8192, 0),
        (8, 1, 8192, 8000),
        (64, 1, 1024, 0),
        (1, 512, 512, 0),
        (1, 1024, 1024, 0),
        (1, 512, 8192, 0),
    ):
        blocks = -(-seq_len // BLOCK_SIZE)
        cache = ops.attention.new_kv_cache(blocks * requests, BLOCK_SIZE, HKV, D, dtype).normal_()
        tables = torch.randperm(blocks * requests).int().view(requests, blocks)
        tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE].clone()
        plan = ops.attention.plan_attention(
            (torch.arange(requests + 1) * tokens).int(),
            torch.full((requests,), seq_len, dtype=torch.int32),
            tables,
            BLOCK_SIZE,
        )
        q = torch.randn(requests * tokens, HQ, D).to(dtype)
        seen = sum(range(seq_len - tokens + 1, seq_len + 1))
        read = requests * (seq_len - shared) + shared
        yield Work(
            f"attention, {requests} x {tokens} tokens at {seq_len}"
            + (f", {shared} of them shared" if shared else ""),
            partial(ops.attention.paged_attention, q, cache, plan, D**-0.5, None, None),
            4.0 * requests * seen * HQ * D,
            q.element_size() * (read * HKV * D * 2 + 2 * q.numel()),
        )


def row_works(ops: Ops, dtype: torch.dtype) -> Iterator[Work]:
    weight = torch.randn(H).to(dtype)
    for rows in (1, 8, 1024):
        x, residual = torch.randn(rows, H).to(dtype), torch.randn(rows, H).to(dtype)
        gate_up = torch.randn(rows, 2 * I).to(dtype)
        q, k, v = torch.randn(rows, QKV // D, D).to(dtype).split((HQ, HKV, HKV), dim=1)
        cache = ops.attention.new_kv_cache(rows // BLOCK_SIZE + 1, BLOCK_SIZE, HKV, D, dtype)
        cos_sin, positions = torch.randn(rows, D), torch.arange(rows)
        size = x.element_size()
        yield Work(
            f"add and norm, {rows} rows",
            partial(ops.rowwise.add_rms_norm, x, residual, weight, 1e-6),
            0.0,
            4 * size * x.numel(),
        )
        yield Work(
            f"silu and mul, {rows} rows",
            partial(ops.rowwise.silu_and_mul, gate_up),
            0.0,
            1.5 * size * gate_up.numel(),
        )
        yield Work(
            f"rotary and KV write, {rows} rows",
            partial(
                ops.attention.rotary_and_write_kv, q, k, v, cos_sin, positions, cache, positions
            ),
            0.0,
            2 * size * rows * QKV,
        )
