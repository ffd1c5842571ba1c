"""Runs llama.cpp's converters: python -m … (model | lora) LLAMA_CPP_SOURCES SOURCE [options].

They know a tokenizer by the hash of what it makes of a sample text, and ours is not in their
list; it splits text as Qwen2's does, so they get Qwen2's name.
"""

from __future__ import annotations

import runpy
import sys

SCRIPTS = {"model": "convert_hf_to_gguf.py", "lora": "convert_lora_to_gguf.py"}


def main() -> None:
    what, sources, *arguments = sys.argv[1:]
    sys.path.insert(0, sources)
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    script = f"{sources}/{SCRIPTS[what]}"
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
