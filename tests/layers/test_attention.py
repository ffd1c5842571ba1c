from __future__ import annotations

import torch

from lora_serve.layers.attention import HeadLayout


def test_a_fused_row_holds_q_then_k_then_v() -> None:
    """Views, so that rotating q in place costs no copy."""
    qkv = torch.arange(2 * 8 * 3).view(2, 24)
    q, k, v = HeadLayout(num_heads=4, num_kv_heads=2, head_size=3).split(qkv)
    assert torch.equal(q, qkv[:, :12].view(2, 4, 3))
    assert torch.equal(k, qkv[:, 12:18].view(2, 2, 3))
    assert torch.equal(v, qkv[:, 18:].view(2, 2, 3))
    assert q.data_ptr() == qkv.data_ptr()
