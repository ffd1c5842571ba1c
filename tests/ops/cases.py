"""Inputs for kernels and what they must give, by the plainest formulas, in float64.

Knows nothing of any backend: a test hands its `Ops` in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops

# Relative to the largest value there is: what one rounding to the dtype, and sums of a thousand
# terms in float32, may move a result by. The narrow ones leave room for weights in the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_numbers(*shape: int, dtype: torch.dtype, most: int, seed: int = 0) -> Tensor:
    """Within [-most, most]: small enough, their products and sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def assert_close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == exact.shape
    error = (got.double() - exact).abs().max().item()
    limit = TOLERANCE[dtype] * max(1.0, exact.abs().max().item())
    assert error <= limit, f"off by {error}, allowed are {limit}"


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


def exact_lora(x: Tensor, parts: Sequence[LoRAPart], out_features: int) -> Tensor:
    """What a fused layer's parts add to its output for rows x."""
    delta = torch.zeros(x.shape[0], out_features, dtype=torch.float64)
    for part in parts:
        end = part.out_start + part.b.shape[0]
        delta[:, part.out_start : end] = (
            part.scale * (x.double() @ part.a.double().t()) @ part.b.double().t()
        )
    return delta


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def exact_silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def exact_gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def exact_soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * (x.double() / cap).tanh()


def exact_rotation(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x: (T, heads, D)."""
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q: (Q, Hq, D), a request's last positions; k and v: (S, Hkv, D), all -> (Q, Hq, D)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = exact_soft_cap(scores, softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        of_rows = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, of_rows), dim=2)
    weights = scores.softmax(-1)[:, :, : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values)


class PagedRequest:
    """One request's q, k, v for all its positions, and its blocks in a shared, poisoned cache."""

    def __init__(
        self, qkv: tuple[Tensor, Tensor, Tensor], block_ids: Tensor, block_size: int
    ) -> None:
        self.q, self.k, self.v = qkv
        self.block_ids = block_ids
        self.block_size = block_size

    def slots(self, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end)
        blocks = self.block_ids[positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size


class PagedCase:
    """Requests over one cache whose memory is NaN wherever nothing was written.

    Blocks are dealt out shuffled. q, k and v are views into one fused tensor, as layers make them.
    """

    def __init__(
        self,
        ops: Ops,
        seq_lens: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        block_size: int = 16,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        seed: int = 0,
    ) -> None:
        self.ops, self.block_size = ops, block_size
        self.window, self.softcap = window, softcap
        # The last is far above all scores, whose share is then nearly nothing.
        self.sinks = torch.linspace(-3.0, 40.0, num_heads) if has_sinks else None
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.scale = head_size**-0.5
        counts = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = sum(counts) + 3
        self.num_blocks = num_blocks
        self.cache = ops.attention.new_kv_cache(
            num_blocks, block_size, num_kv_heads, head_size, dtype
        )
        self.cache.fill_(torch.nan)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        angles = torch.rand(max(seq_lens), head_size // 2, generator=torch.Generator()) * 6.28
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.requests = []
        for index, seq_len in enumerate(seq_lens):
            fused = normal(seq_len, sum(self.heads), head_size, dtype=dtype, seed=seed + index)
            ids, shuffled = shuffled[: counts[index]].int(), shuffled[counts[index] :]
            self.requests.append(PagedRequest(fused.split(self.heads, dim=1), ids, block_size))

    def write(self, chunks: Sequence[tuple[int, int, int]]) -> Tensor:
        """Write the KV of (request, start, end) chunks; their rotated q, one after the other."""
        parts = [(self.requests[index], start, end) for index, start, end in chunks]
        fused = torch.cat([torch.cat((r.q, r.k, r.v), dim=1)[start:end] for r, start, end in parts])
        q, k, v = fused.split(self.heads, dim=1)
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        slots = torch.cat([r.slots(start, end) for r, start, end in parts])
        self.ops.attention.rotary_and_write_kv(q, k, v, self.cos_sin, positions, self.cache, slots)
        return q

    def step(self, chunks: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Run (request, start, end) chunks as one batch; the attention output of each."""
        return self.attend(self.write(chunks), chunks)

    def attend(self, q: Tensor, chunks: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """`step` for q that `write` gave."""
        parts = [(self.requests[index], start, end) for index, start, end in chunks]
        sizes = [end - start for _, start, end in parts]
        plan = self.ops.attention.plan_attention(
            torch.tensor([0, *sizes]).cumsum(0).int(),
            torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            self._block_tables([r for r, _, _ in parts]),
            self.block_size,
        )
        out = self.ops.attention.paged_attention(
            q, self.cache, plan, self.scale, self.window, self.softcap, self.sinks
        )
        return list(out.split(sizes))

    def chunked(self, index: int, chunk: int) -> Tensor:
        """A whole request, alone, in chunks of one size."""
        seq_len = len(self.requests[index].q)
        steps = range(0, seq_len, chunk)
        return torch.cat([self.step([(index, s, min(s + chunk, seq_len))])[0] for s in steps])

    def free_blocks_before(self, index: int, position: int, poison: float) -> None:
        """Spoil the blocks that lie wholly before a position; the request then names another.

        The block that it names in their place belongs to no request, and is spoilt too.
        """
        ids = self.requests[index].block_ids
        taken = {int(i) for request in self.requests for i in request.block_ids}
        spare = next(i for i in range(self.num_blocks) if i not in taken)
        num_freed = max(0, position) // self.block_size
        self.cache[ids[:num_freed].long()] = poison
        self.cache[spare] = poison
        ids[:num_freed] = spare

    def exact(self, index: int, start: int = 0) -> Tensor:
        """Attention from position start on, of rotated q, and k and v in the cache's dtype."""
        request = self.requests[index]
        positions = torch.arange(len(request.q))
        q = exact_rotation(request.q[start:], self.cos_sin, positions[start:]).to(request.q.dtype)
        k = exact_rotation(request.k, self.cos_sin, positions).to(request.k.dtype)
        return exact_attention(q, k, request.v, self.scale, self.window, self.softcap, self.sinks)

    def _block_tables(self, requests: Sequence[PagedRequest]) -> Tensor:
        """Filled up with block 0, which may be another request's."""
        tables = [request.block_ids for request in requests]
        return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
