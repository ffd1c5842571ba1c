"""Each kernel at a model's sizes, against the ceilings of the card.

H hidden, I intermediate, V vocabulary, Hq and Hkv heads of D, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.common.make_checkpoint import ModelShape
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.timing import Stopwatch
from benchmarks.speed.kernels.work import Work
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.quantization import INT4, INT8

BLOCK_SIZE = 16
RANK = 16


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """share: the time that the nearer ceiling asks for, of the time taken."""

    name: str
    microseconds: float
    tflops: float
    gb_per_second: float
    share: float


def time_work(work: Work, watch: Stopwatch, ceilings: Ceilings) -> KernelTiming:
    seconds = watch.seconds(work.run)
    return KernelTiming(
        name=work.name,
        microseconds=seconds * 1e6,
        tflops=work.flops / seconds / 1e12,
        gb_per_second=work.num_bytes / seconds / 1e9,
        share=ceilings.seconds(work.flops, work.num_bytes) / seconds,
    )


class Works:
    """The works of one shape. rows: how many of decode and of prefill."""

    def __init__(self, ops: Ops, exact_ops: Ops, shape: ModelShape, dtype: torch.dtype) -> None:
        """exact_ops: with --batch-invariant, which has linear layers of its own."""
        self._ops = ops
        self._exact_ops = exact_ops
        self._shape = shape
        self._dtype = dtype

    def all(self, decode_rows: tuple[int, ...], prefill_rows: int) -> Iterator[Work]:
        yield from self.linear((*decode_rows, prefill_rows))
        yield from self.quantized_linear((*decode_rows, prefill_rows))
        yield from self.lora(decode_rows, prefill_rows)
        yield from self.attention(decode_rows, prefill_rows)
        yield from self.rowwise((decode_rows[-1], prefill_rows))

    def linear(self, rows: tuple[int, ...]) -> Iterator[Work]:
        for name, (outputs, inputs) in self._layers.items():
            packed = self._ops.linears.pack_linear(self._random(outputs, inputs), None)
            for count in rows:
                x = self._random(count, inputs)
                for how, ops in (("", self._ops), (", batch-invariant", self._exact_ops)):
                    yield Work(
                        f"linear {name}, {count} rows{how}",
                        partial(ops.linears.linear, x, packed),
                        2.0 * count * outputs * inputs,
                        self._bytes(outputs * inputs + count * (inputs + outputs)),
                    )

    def quantized_linear(self, rows: tuple[int, ...]) -> Iterator[Work]:
        """Codes as `--quantization` finds them, with activations as they are and in 8 bits."""
        assert self._ops.pack_quantized is not None
        for (name, (outputs, inputs)), form in product(self._layers.items(), (INT8, INT4)):
            weight_bytes = outputs * inputs * (form.bits + 16 / form.group) / 8
            for how, quantize_activations in (("", False), (", activations in 8 bits", True)):
                packed = self._ops.pack_quantized(
                    self._random(outputs, inputs), form, None, quantize_activations
                )
                for count in rows:
                    yield Work(
                        f"{form.name} linear {name}, {count} rows{how}",
                        partial(self._ops.linears.linear, self._random(count, inputs), packed),
                        2.0 * count * outputs * inputs,
                        weight_bytes + self._bytes(count * (inputs + outputs)),
                    )

    def lora(self, decode_rows: tuple[int, ...], prefill_rows: int) -> Iterator[Work]:
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        weights = RANK * (2 * hidden + 2 * inner)
        cases = [(rows, count) for rows in decode_rows for count in sorted({1, rows})]
        for rows, num_adapters in (*cases, (prefill_rows, 1)):
            adapters = [self._adapter() for _ in range(num_adapters)]
            each = rows // num_adapters
            plan = self._ops.adapters.plan_lora(
                [(i * each, (i + 1) * each, adapter) for i, adapter in enumerate(adapters)], rows
            )
            x, y = self._random(rows, hidden), self._random(rows, 2 * inner)
            yield Work(
                f"lora gate up, rank {RANK}, {rows} rows of {num_adapters} adapters",
                partial(self._ops.adapters.lora, y, x, plan, 0),
                2.0 * rows * weights,
                self._bytes(num_adapters * weights + x.numel() + 2 * y.numel()),
            )

    def attention(self, decode_rows: tuple[int, ...], prefill_rows: int) -> Iterator[Work]:
        cases = [(rows, 1, 1024) for rows in decode_rows]
        for requests, tokens, seq_len in (*cases, (1, 1, 16_384), (1, prefill_rows, prefill_rows)):
            yield self._attention(requests, tokens, seq_len)

    def _attention(self, requests: int, tokens: int, seq_len: int) -> Work:
        """`tokens` new ones in each of so many requests that have `seq_len` positions."""
        shape, ops = self._shape, self._ops
        heads, kv_heads, size = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        blocks = -(-seq_len // BLOCK_SIZE)
        cache = ops.attention.new_kv_cache(
            blocks * requests, BLOCK_SIZE, kv_heads, size, self._dtype
        )
        plan = ops.attention.plan_attention(
            (torch.arange(requests + 1) * tokens).int(),
            torch.full((requests,), seq_len, dtype=torch.int32),
            torch.randperm(blocks * requests).int().view(requests, blocks),
            BLOCK_SIZE,
        )
        q = self._random(requests * tokens, heads, size)
        seen = sum(range(seq_len - tokens + 1, seq_len + 1))
        return Work(
            f"attention, {requests} x {tokens} tokens at {seq_len}",
            partial(
                ops.attention.paged_attention, q, cache.normal_(), plan, size**-0.5, None, None
            ),
            4.0 * requests * seen * heads * size,
            self._bytes(requests * seq_len * kv_heads * size * 2 + 2 * q.numel()),
        )

    def rowwise(self, rows: tuple[int, ...]) -> Iterator[Work]:
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        weight = self._random(hidden)
        for count in rows:
            x, residual = self._random(count, hidden), self._random(count, hidden)
            yield Work(
                f"add and norm, {count} rows",
                partial(self._ops.rowwise.add_rms_norm, x, residual, weight, 1e-6),
                0.0,
                self._bytes(4 * x.numel()),
            )
            gate_up = self._random(count, 2 * inner)
            yield Work(
                f"silu and mul, {count} rows",
                partial(self._ops.rowwise.silu_and_mul, gate_up),
                0.0,
                self._bytes(1.5 * gate_up.numel()),
            )

            yield self._rotary(count)

    def _rotary(self, count: int) -> Work:
        shape, ops = self._shape, self._ops
        heads, kv_heads, size = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        qkv = self._random(count, heads + 2 * kv_heads, size)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        angles = torch.zeros(count, size, device=ops.device)
        blocks = -(-count // BLOCK_SIZE)
        cache = ops.attention.new_kv_cache(blocks, BLOCK_SIZE, kv_heads, size, self._dtype)
        rows = torch.arange(count, device=ops.device)
        return Work(
            f"rotary and KV write, {count} rows",
            partial(ops.attention.rotary_and_write_kv, q, k, v, angles, rows, cache, rows),
            0.0,
            self._bytes(2 * qkv.numel()) + angles.nbytes,
        )

    def _adapter(self) -> object:
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        parts = [
            LoRAPart(self._random(RANK, hidden), self._random(inner, RANK), 1.0, start)
            for start in (0, inner)
        ]
        return self._ops.adapters.pack_adapter([parts])

    @property
    def _layers(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of linear layers."""
        hidden, inner = self._shape.hidden_size, self._shape.intermediate_size
        return {
            "q k v": (self._qkv_size, hidden),
            "gate up": (2 * inner, hidden),
            "down": (hidden, inner),
        }

    @property
    def _qkv_size(self) -> int:
        shape = self._shape
        return (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self._ops.device).to(self._dtype)

    def _bytes(self, num_values: float) -> float:
        return num_values * self._dtype.itemsize
