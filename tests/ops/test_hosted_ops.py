"""The wrapping through which a card's kernels are tested, tried on kernels that need none."""

from __future__ import annotations

import torch

from lora_serve.ops.contract import LoRAPart
from lora_serve.ops.reference import REFERENCE
from tests.fakes.hosted_ops import HostedOps
from tests.ops.cases import PagedCase, normal

HOSTED = HostedOps(REFERENCE).ops()
F32 = torch.float32


def test_wrapped_kernels_give_what_they_give_bare() -> None:
    x, weight, bias = normal(5, 16, dtype=F32), normal(8, 16, dtype=F32, seed=1), torch.ones(8)
    norm_weight = normal(16, dtype=F32, seed=2)
    part = LoRAPart(normal(2, 16, dtype=F32, seed=3), normal(8, 2, dtype=F32, seed=4), 0.5, 0)
    results = []
    for ops in (REFERENCE, HOSTED):
        y = ops.linears.linear(x, ops.linears.pack_linear(weight, bias))
        ops.adapters.lora(
            y, x, ops.adapters.plan_lora([(1, 4, ops.adapters.pack_adapter([[part]]))], 5), 0
        )
        residual = x.clone()
        normed = ops.rowwise.add_rms_norm(x, residual, norm_weight, 1e-6)
        rest = ops.rowwise.rms_norm(x, norm_weight, 1e-6), ops.rowwise.silu_and_mul(x)
        results.append((y, residual, normed, *rest))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_wrapped_attention_reads_what_wrapped_writes_wrote() -> None:
    outputs = [
        PagedCase(ops, [40], num_heads=4, num_kv_heads=2, head_size=16, dtype=F32).chunked(0, 13)
        for ops in (REFERENCE, HOSTED)
    ]
    assert torch.equal(*outputs)
