from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from lora_serve.config import KVTierConfig
from lora_serve.identity import BlockHash
from lora_serve.kv.store_policy import StoreAfterHits, StoreAll, StorePrompts, make_store_policy


@dataclass
class Asked:
    """A request as a policy sees it: so many blocks of two tokens."""

    names: str
    num_prompt_tokens: int = 100
    block_size: int = 2
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = [BlockHash(name.encode()) for name in self.names]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("all", StoreAll), ("prompt-only", StorePrompts), ("after-n-hits", StoreAfterHits)],
)
def test_each_name_has_its_policy(name: str, kind: type) -> None:
    assert type(make_store_policy(KVTierConfig(kv_store_policy=name))) is kind


def test_prompt_only_ends_where_the_first_block_holds_more_than_prompt() -> None:
    policy = StorePrompts()
    request = Asked("abcd", num_prompt_tokens=5)
    assert policy.committed(request, range(4)) == range(2)
    assert policy.committed(request, range(1, 4)) == range(1, 2)
    assert not policy.committed(request, range(2, 4))


def test_hits_are_counted_from_the_second_request_on() -> None:
    policy = StoreAfterHits(1)
    assert policy.admitted(Asked("abc"), 0) == []
    assert policy.committed(Asked("abc"), range(3)) == []
    assert policy.admitted(Asked("abd"), 2) == [0, 1]
    assert policy.admitted(Asked("abd"), 3) == [2]  # a and b are stored already


def test_what_was_generated_counts_from_its_commit_on() -> None:
    policy = StoreAfterHits(1)
    policy.admitted(Asked("a"), 0)
    assert policy.committed(Asked("ab"), range(2)) == []
    assert policy.admitted(Asked("ab"), 2) == [0, 1]


def test_a_preempted_request_does_not_hit_its_own_blocks() -> None:
    policy = StoreAfterHits(1)
    policy.admitted(Asked("ab"), 0)
    assert policy.admitted(Asked("ab", num_preemptions=1), 2) == ()


def test_counts_of_what_was_not_asked_for_lately_are_forgotten() -> None:
    policy = StoreAfterHits(1, max_counted=2)
    for names in ("a", "b", "c"):
        policy.admitted(Asked(names), 0)
    assert policy.admitted(Asked("a"), 1) == []
    assert policy.admitted(Asked("c"), 1) == [0]
