from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lora_serve.structured_output.backend import Vocabulary
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.wire import GrammarSettings
from lora_serve.text.tokenizer import Tokenizer


@pytest.fixture(scope="package")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(str(model_path))


@pytest.fixture(scope="package")
def grammars(model_path: Path, tokenizer: Tokenizer) -> Iterator[GrammarProcess]:
    """One process for all tests; compiling may take it a second."""
    process = GrammarProcess(grammar_settings(model_path, tokenizer))
    yield process
    process.shut_down()


@pytest.fixture(scope="package")
def xgrammars(model_path: Path, tokenizer: Tokenizer) -> Iterator[GrammarProcess]:
    """One process with xgrammar for all tests; it takes some seconds to load."""
    require_xgrammar()
    settings = grammar_settings(model_path, tokenizer, backend="xgrammar")
    settings = msgspec.structs.replace(settings, compile_seconds=20.0)  # on a machine that is busy
    process = GrammarProcess(settings)
    yield process
    process.shut_down()


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        tokenizer.to_json(),
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        tokenizer.token_bytes,
        tokenizer.special_token_ids,
    )


def require_xgrammar() -> None:
    if importlib.util.find_spec("xgrammar") is None:
        pytest.skip("*** NO XGRAMMAR: it is not tested; pip install 'lora-serve[xgrammar]' ***")


def grammar_settings(
    model_path: Path, tokenizer: Tokenizer, *, backend: str = "llguidance"
) -> GrammarSettings:
    return GrammarSettings(
        backend=backend,
        tokenizer=str(model_path),
        revision=None,
        model=str(model_path),
        vocab_size=tokenizer.vocab_size,
        compile_seconds=2.0,
        max_grammar_bytes=64 * 2**20,
    )
