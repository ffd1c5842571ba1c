"""Imports transformers as where torch is not installed: tokenizers need none of it.

That halves what a server's API process and its process of grammars import for a tokenizer that
transformers reads, and keeps 180 MiB out of the memory of each.
"""

from __future__ import annotations

import os
import sys

from lora_serve.gguf.location import names_gguf

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # or it tells everyone that models need torch


def import_for_tokenizer(source: str) -> None:
    """Import transformers, as `import_transformers` does, where this tokenizer is read by it."""
    if not names_gguf(source):
        import_transformers()


def import_transformers() -> None:
    """Import it for good, for this process; only where no model is built by it.

    Torch itself can be imported later. Where one of the two has been already, nothing is gained,
    and nothing changes.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python takes for "there is none"
    try:
        import transformers.utils  # noqa: F401
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before
