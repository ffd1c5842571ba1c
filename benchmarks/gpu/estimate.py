"""python -m benchmarks.gpu.estimate: what a card's data sheet allows at most. Nothing is measured.

A decode step reads every weight once, each request's KV, and each adapter in the step; a prefill
multiplies every weight with every token. No engine is faster than the slower of bytes and products.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.shapes import SHAPES
from benchmarks.limits import BF16_BYTES, adapter_weights, layer_weights, vocabulary_weights
from benchmarks.make_checkpoint import ModelShape

CONTEXT = 1024
CASES = ((1, 0), (32, 0), (32, 32), (256, 0), (256, 256))  # (requests, adapters)


@dataclass(frozen=True, slots=True)
class Card:
    """From its maker's data sheet; flops: dense bfloat16."""

    name: str
    bytes_per_second: float
    flops: float


H200 = Card("H200", 4.8e12, 989e12)


def decode_seconds(card: Card, shape: ModelShape, num_requests: int, num_adapters: int) -> float:
    """One step of requests that have CONTEXT tokens each."""
    weights = layer_weights(shape) + vocabulary_weights(shape)
    kv_values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * CONTEXT
    values = weights + num_requests * kv_values + num_adapters * adapter_weights(shape)
    attention = 2 * num_requests * kv_values * shape.num_attention_heads
    flops = 2 * num_requests * weights + attention / shape.num_key_value_heads
    return max(BF16_BYTES * values / card.bytes_per_second, flops / card.flops)


def prefill_tokens_per_second(card: Card, shape: ModelShape) -> float:
    """Of prompts short enough that attention does not count."""
    return card.flops / (2 * layer_weights(shape))


def table(card: Card) -> str:
    heads = [f"{n} request{'s' * (n > 1)}" + (f", {a} adapters" if a else "") for n, a in CASES]
    lines = [["shape", *heads, "prefill, tokens/s"], ["---", *["--:"] * (len(heads) + 1)]]
    for name in ("0.5B", "3B", "7B"):
        shape = SHAPES[name]
        steps = [f"{1e3 * decode_seconds(card, shape, n, a):.2f} ms" for n, a in CASES]
        lines.append([name, *steps, f"{prefill_tokens_per_second(card, shape):,.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table(H200))
