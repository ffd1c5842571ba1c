"""Weights as the tools themselves wrote them, read as the tools themselves dequantise them.

Each pair of files in `written` is one matrix, k_proj (64 x 128) of a small random Llama. The JSON
says which tool wrote it, the quantization_config, and the SHA-256 of the weight that the tool makes
of it, rounded to `dtype`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from lora_serve.config.model import AUTO
from lora_serve.models.checkpoints.choose import format_of

WRITTEN = Path(__file__).parent / "written"
WEIGHT = "model.layers.0.self_attn.k_proj.weight"
# With the bits and the group of the codes that kernels get, if they are kept.
KEPT: dict[str, tuple[int, int] | None] = {
    "autoawq-gemm": (4, 32),
    "bitsandbytes-fp4": None,
    "bitsandbytes-int8": (8, 128),
    "bitsandbytes-nf4": None,
    "bitsandbytes-nf4-double": None,
    "gptqmodel-4": (4, 32),
    "gptqmodel-4-act-order": None,
    "gptqmodel-4-asymmetric": (4, 32),
    "gptqmodel-8": (8, 32),
    "gptqmodel-8-asymmetric": (8, 128),
    "gptqmodel-awq": (4, 32),
    "gptqmodel-fp8": None,
    "gptqmodel-v2-asymmetric": (4, 32),
    "llmcompressor-awq-w4a16-asymmetric": (4, 128),
    "llmcompressor-fp8-block": None,
    "llmcompressor-fp8-dynamic": None,
    "llmcompressor-fp8-kv": None,
    "llmcompressor-gptq-w4a16-act-order": (4, 128),
    "llmcompressor-mixed": (8, 128),
    "llmcompressor-w4a16": (4, 128),
    "llmcompressor-w4a16-asymmetric": (4, 128),
    "llmcompressor-w4afp8": (4, 128),
    "llmcompressor-w8a16": (8, 128),
    "llmcompressor-w8a8": (8, 128),
}


def test_every_file_is_read_here() -> None:
    assert {path.stem for path in WRITTEN.glob("*.json")} == KEPT.keys()


@pytest.mark.parametrize("name", KEPT)
def test_a_tools_own_file_is_read_as_the_tool_reads_it(name: str, tmp_path: Path) -> None:
    told = json.loads((WRITTEN / f"{name}.json").read_text())
    config = {"quantization_config": told["quantization_config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(WRITTEN / f"{name}.safetensors", tmp_path / "model.safetensors")
    opened = format_of(tmp_path, AUTO).open(tmp_path)
    assert opened.tensors().keys() == {WEIGHT}
    weight, codes = opened.read(WEIGHT), opened.read_codes(WEIGHT)
    rounded = weight.to(getattr(torch, told["dtype"]))
    assert hashlib.sha256(rounded.view(torch.uint8).numpy().tobytes()).hexdigest() == told["sha256"]
    assert (codes and (codes.format.bits, codes.format.group)) == KEPT[name]
    assert codes is None or torch.equal(codes.dequantized(), weight)
