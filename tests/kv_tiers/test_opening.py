from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_serve.config import KVTierConfig
from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.opening import check_tiers

NOBODY = 65534


def test_a_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    check_tiers(KVTierConfig(kv_disk_path=str(tmp_path / "a" / "b")))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--kv-disk-path .*file: .*name a directory"):
        check_tiers(KVTierConfig(kv_disk_path=str(tmp_path / "file")))


def test_a_directory_without_the_right_to_write_is_refused(short_path: Path) -> None:
    short_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # whom nothing is refused
        os.chown(short_path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        with pytest.raises(ConfigError, match=r"no file can be made there .*; give this user"):
            check_tiers(KVTierConfig(kv_disk_path=str(short_path)))
    finally:
        os.seteuid(user)
        short_path.chmod(0o700)


def test_settings_in_json_are_checked_like_flags() -> None:
    with pytest.raises(ConfigError, match="--kv-disk-path /proc/kv"):
        check_tiers(KVTierConfig(kv_transfer_config='{"kv_disk_path": "/proc/kv"}'))
