from __future__ import annotations

import torch

from lora_serve.layers.norm import RMSNorm
from lora_serve.ops.reference import REFERENCE
from tests.ops.cases import exact_rms_norm, normal


def test_heads_are_normed_one_by_one_also_when_they_are_a_view() -> None:
    fused, weight = normal(5, 6, 8, dtype=torch.float32), normal(8, dtype=torch.float32, seed=1)
    heads = fused[:, 1:4]
    normed = RMSNorm(REFERENCE, weight, 1e-6)(heads)
    torch.testing.assert_close(normed.double(), exact_rms_norm(heads, weight, 1e-6))
