from __future__ import annotations

from tests.fakes.threads import one_thread
from tests.models.conftest import directories, tiny_models

__all__ = ["directories", "one_thread", "tiny_models"]
