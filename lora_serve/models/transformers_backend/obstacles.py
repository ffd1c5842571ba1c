"""What an architecture has that no trace is needed to see, and that this server has nothing for."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lora_serve.models.common_config import RECURRENT_STATE

_RECURRENT = frozenset(("conv", "hybrid", "hybrid_sliding", "linear_attention"))
_CHOOSING = frozenset(
    ("compressed_sparse_attention", "heavily_compressed_attention", "indexed_attention")
)
_CROSS_ATTENTION = ("cross_attn", "crossattention", "encoder_attn")


def obstacle(config: Any, model_class: Any) -> str | None:
    """Why a model of this class cannot be served, as far as its config says; None: nothing known.

    config: of transformers.
    """
    stated = getattr(config.get_text_config(), "layer_types", None)
    kinds = sorted(set(stated)) if isinstance(stated, list) else []
    recurrent = [kind for kind in kinds if kind in _RECURRENT]
    if recurrent:
        return f"its layers of {', '.join(recurrent)} {RECURRENT_STATE}"
    if not kinds and getattr(model_class, "_is_stateful", False):
        return f"its layers {RECURRENT_STATE}"
    choosing = [kind for kind in kinds if kind in _CHOOSING]
    if choosing:
        return (
            f"its layers of {', '.join(choosing)} attend to tokens that they choose; attention "
            "here sees all earlier ones or a window of them"
        )
    if _has_alibi(config, model_class):
        return "its attention has ALiBi's biases, which the attention kernels do not add"
    return None


def cross_attention(model: nn.Module) -> str | None:
    """Why a model cannot be served that attends to an encoder's output; None: it does not."""
    found = next(
        (name for name, _ in model.named_modules() if name.endswith(_CROSS_ATTENTION)), None
    )
    return None if found is None else f"it has cross attention to an encoder's output ({found})"


def _has_alibi(config: Any, model_class: Any) -> bool:
    names = vars(sys.modules[model_class.__module__])
    if not any("alibi" in name for name in names):
        return False
    return bool(getattr(getattr(config, "attn_config", config), "alibi", True))
