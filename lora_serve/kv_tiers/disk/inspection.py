"""Looks into a disk tier's directory from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lora_serve.errors import NotFoundError
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.kv_tiers.codec import HEADER_BYTES, record_bytes, written_time
from lora_serve.kv_tiers.disk.directory import DiskDirectory
from lora_serve.kv_tiers.disk.group_file import (
    GroupTable,
    RefusedGroupError,
    read_records,
    read_table,
)
from lora_serve.kv_tiers.inspection import Summary, Verdict
from lora_serve.kv_tiers.mac import MacKeys

READ_BYTES = 16 * 2**20


class DiskInspection:
    def __init__(self, path: Path, keys: MacKeys) -> None:
        """Raises NotFoundError where no disk tier is."""
        self._keys = keys
        if not (path / "namespaces").is_dir():
            raise NotFoundError(
                f"{path}: no KV is stored here; name the --kv-disk-path of a server"
            )
        self._directory = DiskDirectory(path, is_inspected=True)

    def summaries(self) -> list[Summary]:
        summaries = []
        for namespace in self._namespaces():
            summary = Summary(namespace)
            for file in self._opened(namespace):
                with suppress(RefusedGroupError):  # that is for `verify`
                    table = read_table(file, namespace)
                    written = _written(file, namespace, table)
                    summary.add(len(table.hashes), table.num_bytes, written)
            summaries.append(summary)
        return summaries

    def verify(self) -> Iterator[Verdict]:
        for namespace in self._namespaces():
            verdict = Verdict(namespace, self._keys)
            for file in self._opened(namespace):
                _verify_file(file, namespace, verdict)
            yield verdict

    def num_broken(self) -> int:
        undescribed = (r for r in self._directory.roots() if self._directory.describe(r) is None)
        return sum(self._is_there(root) for root in undescribed)  # else just dropped

    def clear(self, namespaces: Sequence[TierNamespace]) -> None:
        for namespace in namespaces:
            self._directory.trash(namespace.root)
        self._directory.empty_trash()

    def clear_everything(self) -> None:
        for root in self._directory.roots():
            self._directory.trash(root)
        self._directory.empty_quarantine()
        self._directory.empty_trash()

    def facts(self) -> Mapping[str, int | str]:
        sizes = [
            os.fstat(file).st_size
            for namespace in self._namespaces()
            for file in self._opened(namespace)
        ]
        quarantined = self._directory.quarantined_bytes()
        return {
            "files": len(sizes),
            "all_files_bytes": sum(sizes),
            "quarantined_files": len(quarantined),
            "quarantined_bytes": sum(quarantined),
            "disk_free_bytes": self._directory.free_bytes(),
        }

    def close(self) -> None:
        self._directory.close()

    def _namespaces(self) -> list[TierNamespace]:
        described = (self._directory.describe(root) for root in self._directory.roots())
        return [namespace for namespace in described if namespace is not None]

    def _opened(self, namespace: TierNamespace) -> Iterator[int]:
        """Each of a namespace's files in turn, but those that a server evicts meanwhile."""
        for name in self._directory.groups(namespace.root):
            with (
                suppress(FileNotFoundError),
                self._directory.of(namespace.root) as folder,
                folder.opened(name) as descriptor,
            ):
                yield descriptor

    def _is_there(self, root: bytes) -> bool:
        try:
            self._directory.of(root).close()
        except FileNotFoundError:
            return False
        return True


def _verify_file(descriptor: int, namespace: TierNamespace, verdict: Verdict) -> None:
    try:
        table = read_table(descriptor, namespace)
    except RefusedGroupError as refused:
        verdict.refused[refused.cause.value] += 1
        return
    size = record_bytes(namespace)
    per_read = max(READ_BYTES // size, 1)
    for first in range(0, len(table.hashes), per_read):
        count = min(per_read, len(table.hashes) - first)
        into = memoryview(bytearray(count * size))
        for record in read_records(descriptor, namespace, table, first, into):
            verdict.judge(record)


def _written(descriptor: int, namespace: TierNamespace, table: GroupTable) -> float | None:
    """When the file's first record was written; all were within a second or two."""
    start = table.num_bytes - len(table.hashes) * record_bytes(namespace)
    return written_time(os.pread(descriptor, HEADER_BYTES, start))
