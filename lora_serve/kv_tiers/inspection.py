"""What lies in a tier, for operators: read from outside, also while servers use it.

Only `clear` changes anything, and nothing is trusted: `verify` reads every byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lora_serve.kv_tiers.base import Record, TierNamespace
from lora_serve.kv_tiers.codec import refusal
from lora_serve.kv_tiers.mac import MacKeys


@dataclass(slots=True)
class Summary:
    """One namespace's blocks. Times are in seconds since 1970; None if not known."""

    namespace: TierNamespace
    num_blocks: int = 0
    num_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None

    def add(self, num_blocks: int, num_bytes: int, written: float | None) -> None:
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes
        if written is not None:
            self.oldest = written if self.oldest is None else min(self.oldest, written)
            self.newest = written if self.newest is None else max(self.newest, written)


@dataclass(slots=True)
class Verdict:
    """What reading all of a namespace found: good blocks, and refused ones by cause.

    keys: whose records are good. A file whose head is refused counts once, whatever it held.
    """

    namespace: TierNamespace
    keys: MacKeys
    num_good: int = 0
    num_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def judge(self, record: Record) -> None:
        cause = refusal(self.namespace, record, self.keys)
        if cause is not None:
            self.refused[cause.value] += 1
            return
        self.num_good += 1
        self.num_bytes += record.num_bytes


class Inspection(Protocol):
    def summaries(self) -> list[Summary]:
        """Give a summary of each namespace."""

    def verify(self) -> Iterator[Verdict]:
        """Give a verdict on each namespace, as they are read."""

    def num_broken(self) -> int:
        """How many namespaces have a damaged descriptor: no server can use their KV."""

    def clear(self, namespaces: Sequence[TierNamespace]) -> None:
        """Delete these namespaces."""

    def clear_everything(self) -> None:
        """Delete also what is broken or set aside."""

    def facts(self) -> Mapping[str, int | str]:
        """What there is to say of the tier as a whole; sizes are named …_bytes."""

    def close(self) -> None: ...
