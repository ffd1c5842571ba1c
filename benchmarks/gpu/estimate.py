"""python -m benchmarks.gpu.estimate: what a card's data sheet allows at most. Nothing is measured.

A decode step reads every weight once, each request's KV, and each adapter in the step; a prefill
multiplies every weight with every token. No engine is faster than the slower of bytes and products.
The second table is what adapters leave of the base model's decode rate, by the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.limits import BF16_BYTES, adapter_weights, layer_weights, vocabulary_weights
from benchmarks.common.make_checkpoint import ModelShape
from benchmarks.gpu.shapes import SHAPES

CONTEXT = 1024
CASES = ((1, 0), (32, 0), (32, 32), (256, 0), (256, 256))  # (requests, adapters)
NAMES = ("0.5B", "3B", "7B")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "all projections": (),
    "q, k, v, o": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "q, v": ("q_proj", "v_proj"),
}


@dataclass(frozen=True, slots=True)
class Card:
    """A card as its maker's data sheet has it; flops: dense bfloat16."""

    name: str
    bytes_per_second: float
    flops: float


H200 = Card("H200", 4.8e12, 989e12)


def decode_seconds(
    card: Card,
    shape: ModelShape,
    num_requests: int,
    num_adapters: int,
    targets: tuple[str, ...] = (),
) -> float:
    """One step of requests that have CONTEXT tokens each; targets: as of limits.adapter_weights."""
    weights = layer_weights(shape) + vocabulary_weights(shape)
    kv_values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * CONTEXT
    values = weights + num_requests * kv_values + num_adapters * adapter_weights(shape, targets)
    attention = 2 * num_requests * kv_values * shape.num_attention_heads
    flops = 2 * num_requests * weights + attention / shape.num_key_value_heads
    return max(BF16_BYTES * values / card.bytes_per_second, flops / card.flops)


def prefill_tokens_per_second(card: Card, shape: ModelShape) -> float:
    """The rate for prompts so short that attention does not count."""
    return card.flops / (2 * layer_weights(shape))


def table(card: Card) -> str:
    heads = [f"{n} request{'s' * (n > 1)}" + (f", {a} adapters" if a else "") for n, a in CASES]
    lines = [["shape", *heads, "prefill, tokens/s"], ["---", *["--:"] * (len(heads) + 1)]]
    for name in NAMES:
        shape = SHAPES[name]
        steps = [f"{1e3 * decode_seconds(card, shape, n, a):.2f} ms" for n, a in CASES]
        lines.append([name, *steps, f"{prefill_tokens_per_second(card, shape):,.0f}"])
    return _joined(lines)


def shares_left(card: Card) -> str:
    """Shares of the base model's decode rate when each request has an adapter of its own."""
    counts = [adapters for _, adapters in CASES if adapters]
    heads = [f"{count} adapters on {which}" for which in TARGETS for count in counts]
    lines = [["shape", *heads], ["---", *["--:"] * len(heads)]]
    for name in NAMES:
        shape = SHAPES[name]
        shares = [
            decode_seconds(card, shape, n, 0) / decode_seconds(card, shape, n, n, targets)
            for targets in TARGETS.values()
            for n in counts
        ]
        lines.append([name, *(f"{share:.0%}" for share in shares)])
    return _joined(lines)


def _joined(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table(H200), shares_left(H200), sep="\n\n")
