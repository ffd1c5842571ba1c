"""What a catalog holds: what each name stands for, which replicas there are, what each has done.

Every change has a serial, which the store gives: the order of changes is the order of serials, and
no clock has a say in it. Serials and generations from elsewhere are refused beyond MAX_NUMBER: what
a replica once believes it writes back to a store that lost it.

A name that was unloaded leaves a record where something hangs on it: its generation, below which
its KV must not be trusted, or a server's --lora-modules, which must not load it again. Of these
MAX_UNLOADED are kept.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_UNLOADED = 4096
MAX_NUMBER = 2**53  # below it, Redis's scripts count exactly

Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a name stands for since a change.

    serial: of that change; 0 until the store has given it one. digest: in hexadecimal; "" once the
    name was unloaded. source: a path or hub id, as every replica is to read it. is_module: whether
    a server's --lora-modules has named it since it last had no record. by, replica, time: who asked
    for it, where, and when (seconds since 1970), for people alone.
    """

    name: str
    serial: Number = 0
    digest: str = ""
    source: str = ""
    generation: Number = 0
    pinned: bool = False
    is_module: bool = False
    by: str = ""
    replica: str = ""
    time: float = 0.0

    @property
    def is_unloaded(self) -> bool:
        return not self.digest

    def is_kept(self, first_generation: int) -> bool:
        """Whether it says more than no record does, of a name that begins with this generation."""
        return not self.is_unloaded or self.is_module or self.generation > first_generation

    def stands_for_the_same(self, other: Record | None) -> bool:
        """Whether an engine that has one of them has nothing to do for the other."""
        return other is not None and (
            (self.name, self.digest, self.source, self.generation, self.pinned)
            == (other.name, other.digest, other.source, other.generation, other.pinned)
        )

    def differs_in_generation_alone(self, other: Record) -> bool:
        """Whether what distinguishes them is a reset."""
        return self.generation > other.generation and self.stands_for_the_same(
            msgspec.structs.replace(other, generation=self.generation)
        )


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that has registered. incarnation: of its process, drawn at its start."""

    replica_id: str
    address: str
    incarnation: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change: a record, a replica that came, or the id of one that left.

    previous: the serial of the change before it. Who has seen another one last has missed some.
    """

    serial: Number
    previous: Number
    record: Record | None = None
    joined: Member | None = None
    left: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything as it is after the change `serial`; a name without a record stands for nothing.

    first_generation: with which such a name begins, no lower than any that was forgotten.
    """

    serial: Number = 0
    first_generation: Number = 0
    records: tuple[Record, ...] = ()
    members: tuple[Member, ...] = ()

    def member(self, replica_id: str) -> Member | None:
        """Who is registered under this id."""
        return next((one for one in self.members if one.replica_id == replica_id), None)


class Failure(msgspec.Struct, frozen=True):
    """Why a replica does not serve what a name stands for since the change `serial`.

    reason: for admins, as it may hold paths. found_digest: of what lies at the record's source,
    where it is other bytes. told: the reason for all callers, without paths.
    """

    serial: int
    reason: str
    found_digest: str = ""
    told: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica has done.

    serial: of the last change it knows. loading: the names that it is still to change, with the
    serials of their records. failed: those for which it refuses requests. Every other name is as
    its record of `serial` or before says.
    """

    serial: int = 0
    loading: dict[str, int] = {}
    failed: dict[str, Failure] = {}


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A registered replica, its last report, and how long ago the store heard from it."""

    member: Member
    report: Report
    silent_seconds: float
