from __future__ import annotations

import pytest

Shapes = dict[str, tuple[int, int]]


@pytest.fixture
def lora_modules() -> Shapes:
    """(out_features, in_features) of the seven projections of two tiny layers."""
    projections = {
        "self_attn.q_proj": (16, 16),
        "self_attn.k_proj": (8, 16),
        "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
    }
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in projections.items()
    }
