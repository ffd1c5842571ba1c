from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest

from lora_serve.identity import (
    BASE_MODEL,
    HASH_ALGOS,
    Activation,
    AdapterRef,
    BlockHash,
    BlockHasher,
    CacheNamespace,
    framed,
    salt_digest,
    tenant_salt,
)

REF = AdapterRef("a", b"d" * 32, 0)
SPACE = CacheNamespace(b"model", REF, "salt")


@pytest.mark.parametrize(
    "other",
    [
        replace(SPACE, model_fingerprint=b"other"),
        replace(SPACE, adapter=BASE_MODEL),
        replace(SPACE, adapter=replace(REF, name="b")),
        replace(SPACE, adapter=replace(REF, digest=b"e" * 32)),
        replace(SPACE, adapter=replace(REF, generation=1)),
        replace(SPACE, cache_salt="pepper"),
        replace(SPACE, cache_salt=""),
    ],
)
@pytest.mark.parametrize("algo", sorted(HASH_ALGOS))
def test_each_field_of_a_namespace_makes_another_root(algo: str, other: CacheNamespace) -> None:
    hasher = BlockHasher(algo)
    assert hasher.root(SPACE) != hasher.root(other)
    assert hasher.root(SPACE) == hasher.root(replace(SPACE))


def test_a_salt_named_like_an_adapter_is_not_that_adapter() -> None:
    hasher = BlockHasher()
    as_salt = CacheNamespace(b"model", BASE_MODEL, "a")
    as_adapter = CacheNamespace(b"model", AdapterRef("a", b""), "")
    assert hasher.root(as_salt) != hasher.root(as_adapter)


def test_a_salt_is_told_to_tiers_by_its_digest_alone() -> None:
    assert salt_digest("") == b""
    assert salt_digest("secret") == hashlib.sha256(b"secret").digest()
    assert salt_digest("\ud800") != salt_digest("?")


def test_framing_keeps_neighbouring_fields_apart() -> None:
    assert framed(b"ab", b"c") != framed(b"a", b"bc")
    assert framed(b"ab") != framed(b"a", b"b")
    assert framed(b"", b"a") != framed(b"a", b"")


OTHER_VERSION = replace(SPACE, adapter=replace(REF, generation=7))


def test_each_field_of_a_block_makes_another_hash() -> None:
    hasher = BlockHasher()
    parent = hasher.root(SPACE)
    base = hasher.extend(parent, [1, 2, 3])
    others = [
        hasher.extend(BlockHash(b"other"), [1, 2, 3]),
        hasher.extend(parent, [1, 2, 4]),
        hasher.extend(parent, [1, 2]),
        hasher.extend(parent, [1, 2, 3], embeds_digest=b"e"),
        hasher.extend(parent, [1, 2, 3], activation=Activation(SPACE, 5)),
        hasher.extend(parent, [1, 2, 3], activation=Activation(SPACE, 6)),
        hasher.extend(parent, [1, 2, 3], activation=Activation(OTHER_VERSION, 5)),
    ]
    assert len({base, *others}) == len(others) + 1


def test_hashes_are_equal_in_every_process() -> None:
    program = (
        "from lora_serve.identity import *;"
        "h = BlockHasher();"
        "n = CacheNamespace(b'model', AdapterRef('a', b'd' * 32, 0), 'salt');"
        "print(h.extend(h.root(n), [1, 2, 3]).hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    hasher = BlockHasher()
    assert runs == {hasher.extend(hasher.root(SPACE), [1, 2, 3]).hex() + "\n"}


def test_a_client_salt_adds_to_the_tenants_salt_and_never_replaces_it() -> None:
    assert tenant_salt("key", "") != tenant_salt("other", "")
    assert tenant_salt("key", "s") != tenant_salt("key", "")
    assert tenant_salt("key", "s") != tenant_salt("other", "s")


def test_a_salt_with_a_lone_surrogate_has_a_hash() -> None:
    assert len(BlockHasher().root(replace(SPACE, cache_salt="\ud800"))) == 32
