from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_serve.folders.folder import Folder
from lora_serve.kv_tiers.disk.staging import Staged


def test_a_staged_file_that_cannot_be_closed_is_deleted(tmp_path: Path) -> None:
    with Folder.at(tmp_path) as folder:
        with pytest.raises(OSError, match="Bad file descriptor"), Staged(folder, "a", 8) as staged:
            os.close(staged.descriptor)
        assert folder.names() == []
