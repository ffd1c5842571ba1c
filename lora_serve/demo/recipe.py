"""The numbers from which the demo's model and adapters grow, and a name for them.

The name covers the source of this package as well, so that a changed corpus or trainer never
serves artefacts of the old one.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from pathlib import Path

_SOURCES = ("recipe", "corpus", "tokenizer", "samples", "training", "adapters", "exam", "build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Shape and schedule. The defaults train in some 100 seconds of one core's time."""

    seed: int = 8
    vocab_size: int = 768
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_model_len: int = 8192
    model_steps: int = 360
    model_learning_rate: float = 4e-3
    lora_rank: int = 16
    lora_alpha: int = 32
    adapter_steps: int = 300
    adapter_learning_rate: float = 4e-3
    max_attempts: int = 6

    @property
    def name(self) -> str:
        """Sixteen hex digits: equal for equal numbers and equal sources."""
        digest = hashlib.sha256(repr(astuple(self)).encode())
        for module in _SOURCES:
            digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
        return digest.hexdigest()[:16]
