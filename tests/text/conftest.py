from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tokenizer_files import byte_level_tokenizer, saved


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The byte-level tokenizer's own directory, for a test that adds or changes files."""
    return saved(byte_level_tokenizer(), tmp_path)
