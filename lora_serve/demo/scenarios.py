"""The scenarios, as data: an adapter is replaced under its name; its old KV must not answer.

Each scenario has adapters under names of its own, so that it may be played on a server that has
played others. Rows 1 to 13 are those of the public report; the rest are ours, first of all the one
that fools servers whose key is name and path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from lora_serve.demo.corpus import ALPHA_LABEL, BASE_LABEL, BETA_LABEL

MODEL_NAME = "lora-serve-demo"
_TENANT = "tenant"


class Version(Enum):
    """The bytes of one adapter, and what they must answer."""

    A = ALPHA_LABEL
    B = BETA_LABEL
    BASE = BASE_LABEL


class Hits(Enum):
    """How many prompt tokens must have come from the prefix cache."""

    NONE = auto()  # none at all: there is no cache
    AFTER_FIRST = auto()  # none in the first request, nearly all in the others
    FROM_FIRST = auto()  # nearly all in every request
    CONCURRENT = auto()  # nearly all but the one prefill that all share


class Server(Enum):
    """The server that a scenario needs, in the order in which they are best started."""

    UNCACHED = auto()
    FRESH = auto()
    EAGER = auto()
    PLAIN_UNCACHED = auto()
    CACHED = auto()


@dataclass(frozen=True, slots=True)
class Load:
    """Load `version`. With `same_path`, its bytes first overwrite those of the last such load."""

    version: Version
    in_place: bool = False
    same_path: bool = False
    adapter: str = _TENANT


@dataclass(frozen=True, slots=True)
class Unload:
    adapter: str = _TENANT


@dataclass(frozen=True, slots=True)
class Ask:
    """`count` equal requests, one by one or all at once; each must answer as `version` does."""

    version: Version
    count: int
    hits: Hits
    cache_salt: str | None = None
    first_line: str = ""
    concurrent: bool = False
    adapter: str = _TENANT


Step = Load | Unload | Ask


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row. Adapters are called by their names here, made unique by the row's number."""

    row: int
    title: str
    steps: tuple[Step, ...]
    server: Server = Server.CACHED


_COMMON_LIMITS = (
    *("--max-loras", "4", "--max-lora-rank", "64"),
    *("--max-model-len", "8192", "--max-num-seqs", "8"),
)
SERVER_FLAGS: dict[Server, tuple[str, ...]] = {
    Server.CACHED: (*_COMMON_LIMITS, "--enable-prefix-caching"),
    Server.UNCACHED: (*_COMMON_LIMITS, "--no-enable-prefix-caching"),
    Server.FRESH: (*_COMMON_LIMITS, "--enable-prefix-caching"),
    Server.EAGER: (*_COMMON_LIMITS, "--enable-prefix-caching", "--enforce-eager"),
    Server.PLAIN_UNCACHED: ("--no-enable-prefix-caching",),
}


def server_flags(server: Server) -> tuple[str, ...]:
    """All flags of a server but model and port."""
    return ("--served-model-name", MODEL_NAME, "--enable-lora", *SERVER_FLAGS[server])


def in_playing_order() -> list[Scenario]:
    """All scenarios, those of one server together."""
    return sorted(SCENARIOS, key=lambda scenario: scenario.server.value)


_A, _B = Version.A, Version.B
_A_IS_WARM: tuple[Step, ...] = (Load(_A), Ask(_A, 2, Hits.AFTER_FIRST))
_A_THEN_B: tuple[Step, ...] = (*_A_IS_WARM, Load(_B, in_place=True))
_A_THEN_B_UNCACHED: tuple[Step, ...] = (
    Load(_A),
    Ask(_A, 1, Hits.NONE),
    Load(_B, in_place=True),
)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(1, "cold, no prefix cache, A", (Load(_A), Ask(_A, 10, Hits.NONE)), Server.UNCACHED),
    Scenario(2, "cold, no prefix cache, B", (Load(_B), Ask(_B, 10, Hits.NONE)), Server.UNCACHED),
    Scenario(
        3,
        "fresh server, B loaded directly",
        (Load(_B), Ask(_B, 10, Hits.AFTER_FIRST)),
        Server.FRESH,
    ),
    Scenario(4, "warm A", (Load(_A), Ask(_A, 12, Hits.AFTER_FIRST))),
    Scenario(5, "A → B in place, same name", (*_A_THEN_B, Ask(_B, 10, Hits.AFTER_FIRST))),
    Scenario(
        6,
        "A → B in place, prefix caching off",
        (*_A_THEN_B_UNCACHED, Ask(_B, 10, Hits.NONE)),
        Server.UNCACHED,
    ),
    Scenario(
        7,
        "5, then another cache_salt",
        (
            *_A_THEN_B,
            Ask(_B, 1, Hits.AFTER_FIRST),
            Ask(_B, 10, Hits.AFTER_FIRST, cache_salt="another tenant"),
        ),
    ),
    Scenario(
        8,
        "5, then another first block",
        (
            *_A_THEN_B,
            Ask(_B, 1, Hits.AFTER_FIRST),
            Ask(_B, 10, Hits.AFTER_FIRST, first_line="This first line is another one."),
        ),
    ),
    Scenario(
        9,
        "B under another name beside A",
        (
            *_A_IS_WARM,
            Load(_B, adapter="another"),
            Ask(_B, 10, Hits.AFTER_FIRST, adapter="another"),
        ),
    ),
    Scenario(
        10,
        "unload A, load B, same name",
        (*_A_IS_WARM, Unload(), Load(_B), Ask(_B, 10, Hits.AFTER_FIRST)),
    ),
    Scenario(
        11, "5 with --enforce-eager", (*_A_THEN_B, Ask(_B, 4, Hits.AFTER_FIRST)), Server.EAGER
    ),
    Scenario(
        12,
        "5 with default flags, no prefix cache",
        (*_A_THEN_B_UNCACHED, Ask(_B, 4, Hits.NONE)),
        Server.PLAIN_UNCACHED,
    ),
    Scenario(
        13,
        "32 at once A, idle, A → B, 32 at once B",
        (
            Load(_A),
            Ask(_A, 32, Hits.CONCURRENT, concurrent=True),
            Load(_B, in_place=True),
            Ask(_B, 32, Hits.CONCURRENT, concurrent=True),
        ),
    ),
    Scenario(
        14,
        "new bytes at the same path, load in place",
        (
            Load(_A, same_path=True),
            Ask(_A, 2, Hits.AFTER_FIRST),
            Load(_B, in_place=True, same_path=True),
            Ask(_B, 10, Hits.AFTER_FIRST),
        ),
    ),
    Scenario(
        15,
        "new bytes at the same path, unload + load",
        (
            Load(_A, same_path=True),
            Ask(_A, 2, Hits.AFTER_FIRST),
            Unload(),
            Load(_B, same_path=True),
            Ask(_B, 10, Hits.AFTER_FIRST),
        ),
    ),
    Scenario(
        16,
        "A → B → A: the old bytes find their KV again",
        (
            *_A_THEN_B,
            Ask(_B, 2, Hits.AFTER_FIRST),
            Load(_A, in_place=True),
            Ask(_A, 10, Hits.FROM_FIRST),
        ),
    ),
    Scenario(
        17,
        "equal bytes at another path keep their KV",
        (
            *_A_IS_WARM,
            Load(_A, in_place=True, same_path=True),
            Ask(_A, 10, Hits.FROM_FIRST),
        ),
    ),
    Scenario(
        18,
        "the base model is none of them",
        (*_A_IS_WARM, Ask(Version.BASE, 4, Hits.AFTER_FIRST, cache_salt="row 18")),
    ),
)
