"""Writes PEFT checkpoints byte by byte, good ones and broken ones, without PEFT or torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PREFIX = "base_model.model."
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3", "embed_tokens", "lm_head"),
)


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def random_tensor(shape: tuple[int, ...], seed: int, dtype: str = "F32") -> StoredTensor:
    """Normal numbers; BF16 is the upper half of a float32."""
    values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
    match dtype:
        case "BF16":
            return StoredTensor(dtype, shape, (values.view("<u4") >> 16).astype("<u2").tobytes())
        case "F16":
            return StoredTensor(dtype, shape, values.astype("<f2").tobytes())
    return StoredTensor(dtype, shape, values.tobytes())


def lora_tensors(
    modules: Mapping[str, tuple[int, int]],
    rank: int = 4,
    *,
    seed: int = 0,
    dtype: str = "F32",
    prefix: str = PREFIX,
) -> dict[str, StoredTensor]:
    """lora_A (rank, in) and lora_B (out, rank) for each module, (out, in) by name."""
    tensors = {}
    for index, (name, (num_out, num_in)) in enumerate(sorted(modules.items())):
        for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            tensor = random_tensor(shape, 1000 * seed + 2 * index + (side == "B"), dtype)
            tensors[f"{prefix}{name}.lora_{side}.weight"] = tensor
    return tensors


def header_of(tensors: Iterable[tuple[str, StoredTensor]]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return header


def safetensors_bytes(
    tensors: Mapping[str, StoredTensor], header: Mapping[str, object] | bytes | None = None
) -> bytes:
    """A file of these tensors, with a header of the caller's if given."""
    if header is None:
        header = header_of(tensors.items())
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = b"".join(tensor.data for tensor in tensors.values())
    return len(raw).to_bytes(8, "little") + raw + data


def peft_config(settings: Mapping[str, object] | None = None) -> dict[str, object]:
    """The config of a plain rank-4 adapter, with the given settings changed."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return config | dict(settings or {})


def write_adapter(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    settings: Mapping[str, object] | None = None,
) -> str:
    """Write a checkpoint, over one that may be there; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(peft_config(settings)))
    (directory / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return str(directory)
