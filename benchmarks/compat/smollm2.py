"""SmolLM2-135M-Instruct as a checkpoint of bfloat16 safetensors, made once and kept.

It is made of the GGUF file that `lora-serve serve smollm2` serves; transformers reads that with the
package gguf.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.make_checkpoint import ModelShape
from lora_serve.demo.cache import build_once
from lora_serve.demo.smollm2 import ensure_smollm2

SHAPE = ModelShape(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49_152,
)
MOST_TOKENS = 512  # if a request names none: small models write a JSON object's spaces without end


def ensure_checkpoint(cache: Path) -> Path:
    """The checkpoint's directory, which is made if it is not there."""
    checkpoint = cache / "smollm2-135m-instruct"
    build_once(checkpoint, lambda target: convert(ensure_smollm2(print), target), print)
    return checkpoint


def convert(gguf: Path, checkpoint: Path) -> None:
    """Write the GGUF file's model and tokenizer as transformers would have saved them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    tokenizer.save_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        trust_remote_code=False,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.generation_config.max_new_tokens = MOST_TOKENS
    model.save_pretrained(checkpoint)
