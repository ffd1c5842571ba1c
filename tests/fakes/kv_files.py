"""Files of the disk tier, written and read as the tier does it, at any path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lora_serve.kv_tiers.base import Record, TierNamespace
from lora_serve.kv_tiers.disk.group_file import GroupTable, read_table, write_group


def write_group_file(path: Path, namespace: TierNamespace, records: Sequence[Record]) -> None:
    with path.open("xb", buffering=0) as file:
        write_group(file.fileno(), namespace, records)


def table_of(path: Path, namespace: TierNamespace) -> GroupTable:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_table(descriptor, namespace)
    finally:
        os.close(descriptor)
