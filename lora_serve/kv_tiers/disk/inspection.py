"""Looks into a disk tier's directory from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lora_serve.errors import NotFoundError
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.codec import HEADER_BYTES, record_bytes, written_time
from lora_serve.kv_tiers.disk.directory import GROUP_SUFFIX, DiskDirectory
from lora_serve.kv_tiers.disk.group_file import (
    GroupTable,
    RefusedGroupError,
    read_records,
    read_table,
)
from lora_serve.kv_tiers.inspection import Summary, Verdict

READ_BYTES = 16 * 2**20


class DiskInspection:
    def __init__(self, path: Path) -> None:
        """Raises NotFoundError where no disk tier is."""
        if not (path / "namespaces").is_dir():
            raise NotFoundError(
                f"{path}: no KV is stored here; name the --kv-disk-path of a server"
            )
        self._directory = DiskDirectory(path)

    def summaries(self) -> list[Summary]:
        summaries = []
        for namespace in self._namespaces():
            summary = Summary(namespace)
            for path in self._directory.groups(namespace.root):
                with suppress(FileNotFoundError, RefusedGroupError):  # evicted, or for `verify`
                    table = read_table(path, namespace)
                    summary.add(
                        len(table.hashes), table.num_bytes, _written(path, namespace, table)
                    )
            summaries.append(summary)
        return summaries

    def verify(self) -> Iterator[Verdict]:
        for namespace in self._namespaces():
            verdict = Verdict(namespace)
            for path in self._directory.groups(namespace.root):
                with suppress(FileNotFoundError):  # a server evicted it just now
                    _verify_file(path, namespace, verdict)
            yield verdict

    def num_broken(self) -> int:
        undescribed = (r for r in self._directory.roots() if self._directory.describe(r) is None)
        return sum(self._directory.of(root).exists() for root in undescribed)  # else just dropped

    def clear(self, namespaces: Sequence[TierNamespace]) -> None:
        for namespace in namespaces:
            self._directory.trash(namespace.root)
        self._directory.empty_trash()

    def clear_everything(self) -> None:
        for root in self._directory.roots():
            self._directory.trash(root)
        for file in self._quarantined():
            file.unlink(missing_ok=True)
        self._directory.empty_trash()

    def facts(self) -> Mapping[str, int | str]:
        files = [
            path
            for namespace in self._namespaces()
            for path in self._directory.groups(namespace.root)
        ]
        quarantined = self._quarantined()
        return {
            "files": len(files),
            "all_files_bytes": sum(_size(file) for file in files),
            "quarantined_files": len(quarantined),
            "quarantined_bytes": sum(_size(file) for file in quarantined),
            "disk_free_bytes": _free_bytes(self._directory.path),
        }

    def close(self) -> None:
        self._directory.close()

    def _namespaces(self) -> list[TierNamespace]:
        described = (self._directory.describe(root) for root in self._directory.roots())
        return [namespace for namespace in described if namespace is not None]

    def _quarantined(self) -> list[Path]:
        return sorted((self._directory.path / "quarantine").glob(f"*{GROUP_SUFFIX}"))


def _verify_file(path: Path, namespace: TierNamespace, verdict: Verdict) -> None:
    try:
        table = read_table(path, namespace)
    except RefusedGroupError as refused:
        verdict.refused[refused.cause.value] += 1
        return
    size = record_bytes(namespace)
    per_read = max(READ_BYTES // size, 1)
    with path.open("rb", buffering=0) as file:
        for first in range(0, len(table.hashes), per_read):
            count = min(per_read, len(table.hashes) - first)
            into = memoryview(bytearray(count * size))
            for record in read_records(file.fileno(), namespace, table, first, into):
                verdict.judge(record)


def _written(path: Path, namespace: TierNamespace, table: GroupTable) -> float | None:
    """When the file's first record was written; all were within a second or two."""
    with path.open("rb", buffering=0) as file:
        file.seek(table.num_bytes - len(table.hashes) * record_bytes(namespace))
        return written_time(file.read(HEADER_BYTES) or b"")


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
