"""The disk among the kinds of tiers."""

from __future__ import annotations

from pathlib import Path

from lora_serve.config import KVTierConfig
from lora_serve.kv_tiers.base import Tier
from lora_serve.kv_tiers.disk.directory import check_writable
from lora_serve.kv_tiers.disk.inspection import DiskInspection
from lora_serve.kv_tiers.inspection import Inspection
from lora_serve.kv_tiers.kind import InspectedPlace, TierKind
from lora_serve.kv_tiers.mac import MacKeys


def _check(config: KVTierConfig, keys: MacKeys) -> None:
    assert config.kv_disk_path, "a disk tier is named"
    check_writable(Path(config.kv_disk_path))


def _open(config: KVTierConfig, keys: MacKeys) -> Tier:
    from lora_serve.kv_tiers.disk.tier import DiskTier  # imports numpy; not for `lora-serve kv`

    assert config.kv_disk_path, "a disk tier is named"
    return DiskTier(
        Path(config.kv_disk_path),
        config.kv_disk_bytes,
        keys=keys,
        follows_others=config.kv_role == "kv_consumer",  # which comes right behind a producer
    )


def _inspect(place: InspectedPlace) -> Inspection | None:
    return None if "://" in place.where else DiskInspection(Path(place.where), place.keys)


KIND = TierKind(
    name="disk",
    is_named=lambda config: bool(config.kv_disk_path),
    check=_check,
    open=_open,
    inspect=_inspect,
    places="a directory",
)
