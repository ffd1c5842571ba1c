from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_serve.config import KVTierConfig
from lora_serve.errors import ConfigError, NotFoundError
from lora_serve.fuzz.runners import TIER_FLAGS
from lora_serve.kv_tiers.codec import NO_KEYS
from lora_serve.kv_tiers.kind import InspectedPlace, TierKind
from lora_serve.kv_tiers.kinds import TIER_KINDS, inspect
from lora_serve.kv_tiers.opening import check_tiers, open_tiers

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


NAMED = {
    "ram": {"kv_ram_bytes": 1000},
    "disk": {"kv_disk_path": "DIRECTORY"},
    "redis": {"kv_redis_url": "redis://127.0.0.1:1"},
}


@pytest.mark.parametrize("kind", TIER_KINDS, ids=lambda kind: kind.name)
def test_a_kind_of_tier_is_opened_if_the_settings_name_it(kind: TierKind, tmp_path: Path) -> None:
    """And traces of the fuzzer can draw it."""
    settings = {
        name: str(tmp_path) if value == "DIRECTORY" else value
        for name, value in NAMED[kind.name].items()
    }
    config = KVTierConfig(**settings)
    assert [other.name for other in TIER_KINDS if other.is_named(config)] == [kind.name]
    assert not kind.is_named(KVTierConfig())
    check_tiers(config)
    (tier,) = open_tiers(config, NO_KEYS)
    assert tier.name == kind.name
    assert tier.traits.num_readers > 0
    tier.close()
    assert TIER_FLAGS[kind.name](tmp_path, "redis://127.0.0.1:1")


def test_a_place_is_inspected_by_the_kind_of_tier_that_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="name the --kv-disk-path of a server"):
        inspect(InspectedPlace(where=str(tmp_path), keys=NO_KEYS))
    assert inspect(InspectedPlace(where="ftp://there", keys=NO_KEYS)) is None


def test_a_redis_that_does_not_answer_is_told_at_the_start_but_refuses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("redis")
    check_tiers(KVTierConfig(kv_redis_url="redis://:secret@127.0.0.1:1"))
    (record,) = caplog.records
    assert record.getMessage().startswith("the Redis of --kv-redis-url does not answer (Redis: ")
    assert "secret" not in record.getMessage()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_without_a_tier_that_others_look_into_is_refused(role: str, tmp_path: Path) -> None:
    alone = KVTierConfig(kv_role=role, kv_ram_bytes=2**20)
    with pytest.raises(ConfigError, match=f"--kv-role {role}: no tier is named"):
        check_tiers(alone)
    (tmp_path / "kv").mkdir(mode=0o700)
    check_tiers(KVTierConfig(kv_role=role, kv_disk_path=str(tmp_path / "kv")))
