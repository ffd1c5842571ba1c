from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from lora_serve.cli.main import main
from lora_serve.config import KVTierConfig
from lora_serve.demo.server_process import free_port
from lora_serve.errors import ConfigError
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Cause, Drop, Tier, TierError, TierNamespace
from lora_serve.kv_tiers.codec import NO_KEYS, VERSION, record_bytes
from lora_serve.kv_tiers.opening import open_tiers
from lora_serve.kv_tiers.redis.keyspace import NAMESPACES, PREFIX, Entry, RedisKeyspace
from lora_serve.kv_tiers.redis.tier import RedisTier
from lora_serve.kv_tiers.store import TieredStore
from tests.fakes.kv_blocks import a_namespace, chain, content, records
from tests.fakes.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]

NS = a_namespace()
HASHES = chain(NS, "a prompt", 24)


@contextmanager
def open_tier(url: str, timeout_seconds: float = 5.0) -> Iterator[RedisTier]:
    tier = RedisTier(url, timeout_seconds)
    try:
        yield tier
    finally:
        tier.close()


@pytest.fixture
def tier(redis_server: RedisServer) -> Iterator[RedisTier]:
    with open_tier(redis_server.url) as tier:
        yield tier


def save(tier: RedisTier, namespace: TierNamespace, hashes: list[BlockHash]) -> int:
    return tier.save(namespace, records(namespace, hashes))


def load(
    tier: RedisTier, namespace: TierNamespace, hashes: list[BlockHash]
) -> tuple[int, Cause | None]:
    """How many blocks came, each with the only right bytes, and why no more."""
    loaded = tier.load(namespace, hashes)
    for block_hash, record in zip(hashes, loaded.records, strict=False):
        assert record.payload == content(namespace, block_hash)
    return len(loaded.records), loaded.cause


def entry(server: RedisServer, namespace: TierNamespace) -> Entry:
    keyspace = RedisKeyspace(server.url, 5.0)
    found = keyspace.entry(namespace)
    keyspace.close()
    assert found is not None, "the namespace is not there"
    return found


def all_keys(server: RedisServer) -> set[bytes]:
    with server.client() as client:
        return set(client.keys(PREFIX + b"*"))


# ── the plain life ──────────────────────────────────────────────────────────────────────────


def test_replicas_share_what_one_of_them_saved(redis_server: RedisServer) -> None:
    with open_tier(redis_server.url) as one, open_tier(redis_server.url) as two:
        assert save(one, NS, HASHES[:20]) == 20
        assert load(two, NS, HASHES) == (20, Cause.ABSENT)
        assert load(two, NS, HASHES[5:15]) == (10, None)
        assert save(two, NS, HASHES) == 4  # the others are there
        assert load(one, NS, HASHES) == (24, None)


def test_replicas_that_write_read_and_drop_at_once_give_only_right_blocks(
    redis_server: RedisServer,
) -> None:
    def live(seed: int) -> int:
        chance, num_found = random.Random(seed), 0
        with open_tier(redis_server.url) as tier:
            for _ in range(150):
                space = a_namespace("n", chance.choice("AB"))
                hashes = chain(space, f"p{chance.randrange(3)}", chance.randrange(1, 8))
                match chance.randrange(10):
                    case 0:
                        tier.drop(Drop(b"model", "n"))
                    case 1 | 2 | 3 | 4:
                        save(tier, space, hashes)
                    case _:
                        num_found += load(tier, space, hashes)[0]  # checks every byte
        return num_found

    with ThreadPoolExecutor(3) as replicas:
        assert all(replicas.map(live, range(3)))


def test_blocks_that_are_used_elsewhere_expire_later(
    redis_server: RedisServer, tier: RedisTier
) -> None:
    save(tier, NS, HASHES)
    found = entry(redis_server, NS)
    with redis_server.client() as client:
        for block_hash in HASHES:
            client.expire(found.block(block_hash), 100)
        tier.touch(NS, HASHES[:4])
        times = [client.ttl(found.block(block_hash)) for block_hash in HASHES]
    assert all(left > 1000 for left in times[:4])
    assert all(left <= 100 for left in times[4:])
    tier.touch(a_namespace("nobody"), HASHES)


def test_a_namespace_that_was_never_written_is_absent(tier: RedisTier) -> None:
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)


def test_a_load_brings_at_most_what_one_answer_should(redis_server: RedisServer) -> None:
    large = a_namespace(block_bytes=3 * 2**20)
    hashes = chain(large, "p", 4)
    with open_tier(redis_server.url) as tier:
        save(tier, large, hashes)
        assert load(tier, large, hashes) == (2, None)
        assert load(tier, large, hashes[2:]) == (2, None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:6379"])
def test_a_url_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--kv-redis-url: Redis URL must specify"):
        RedisTier(url, 1.0)


# ── dropping ────────────────────────────────────────────────────────────────────────────────


def test_dropping_an_adapter_frees_its_blocks_and_no_others(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    spaces = [a_namespace("n", "A"), a_namespace("n", "A", salt="s"), a_namespace("n", "B"),
              a_namespace("m", "A"), a_namespace("")]  # fmt: skip
    for space in spaces:
        save(tier, space, chain(space, "p", 600))  # more than one turn of unlinking
    tier.drop(Drop(b"model", "n", (spaces[2].digest, 0)))
    assert [load(tier, space, chain(space, "p", 4))[0] for space in spaces] == [0, 0, 4, 4, 4]
    assert len(all_keys(redis_server)) == 1 + 3 * (1 + 600)
    tier.drop(Drop(b"model"))
    assert all_keys(redis_server) == set()


def test_keys_of_another_version_of_the_software_are_left_alone(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    """Neither read, nor expired, nor deleted: that version may run beside this one."""
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        for key in client.keys(PREFIX + b"*"):
            other = key.replace(PREFIX, b"lora-serve:kv:%d:" % (VERSION + 1))
            client.restore(other, 0, client.dump(key))
        others = set(client.keys(b"lora-serve:kv:%d:*" % (VERSION + 1)))
        assert len(others) == len(all_keys(redis_server)) == 1 + 24 + 1
        tier.drop(Drop(b"model"))
        assert all_keys(redis_server) == set()
        assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
        save(tier, NS, HASHES[:4])
        assert load(tier, NS, HASHES)[0] == 4
        assert set(client.keys(b"lora-serve:kv:%d:*" % (VERSION + 1))) == others
        assert all(client.ttl(other) == -1 for other in others)


def test_a_drop_reaches_blocks_that_no_set_leads_to(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        client.delete(entry(redis_server, NS).members)  # as if the server had evicted it
    tier.drop(Drop(b"model", "n"))
    save(tier, NS, HASHES[:1])
    assert load(tier, NS, HASHES) == (1, Cause.ABSENT)


def test_what_is_written_while_its_namespace_is_dropped_leaves_nothing_behind(
    redis_server: RedisServer,
) -> None:
    keyspace = RedisKeyspace(redis_server.url, 5.0)
    found = keyspace.ensure_entry(NS)
    keyspace.forget(found)
    keyspace.write(found, records(NS, HASHES))
    assert all_keys(redis_server) == set()
    keyspace.close()


def test_a_drop_that_ends_half_way_leaves_only_what_expires(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-zpopmin")
        with pytest.raises(TierError, match="zpopmin"):
            tier.drop(Drop(b"model", "n"))
        assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
        assert all(client.ttl(key) > 0 for key in all_keys(redis_server))


def test_a_descriptor_that_cannot_be_read_makes_its_blocks_unreachable(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        client.hset(PREFIX + b"namespaces", NS.root, b"{")
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert save(tier, NS, HASHES) == 24
    assert load(tier, NS, HASHES) == (24, None)


# ── faults ──────────────────────────────────────────────────────────────────────────────────


def test_a_killed_server_is_an_error_until_it_is_back(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES)
    redis_server.kill()
    with pytest.raises(TierError, match="Redis: "):
        tier.load(NS, HASHES)
    with pytest.raises(TierError):
        save(tier, NS, HASHES)
    redis_server.start()
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert save(tier, NS, HASHES) == 24
    assert load(tier, NS, HASHES) == (24, None)


def test_a_server_that_does_not_answer_costs_no_more_than_the_deadline(
    redis_server: RedisServer,
) -> None:
    with open_tier(redis_server.url, 0.1) as tier:
        save(tier, NS, HASHES)
        redis_server.pause()
        for _ in range(2):  # on the open connection, then on a new one
            start = time.monotonic()
            with pytest.raises(TierError, match="Redis: Timeout"):
                tier.load(NS, HASHES)
            assert time.monotonic() - start < 4.0
        redis_server.resume()
        assert load(tier, NS, HASHES) == (24, None)


def test_a_full_server_refuses_saves_and_still_gives_what_it_has(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES[:4])
    with redis_server.client() as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(TierError, match="used memory > 'maxmemory'") as refused:
        save(tier, NS, HASHES)
    assert "ZADD" not in str(refused.value), "redis-py's account of the command, bytes included"
    assert load(tier, NS, HASHES) == (4, Cause.ABSENT)


def test_a_full_server_forgets(tier: RedisTier, redis_server: RedisServer) -> None:
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        client.config_set("maxmemory", 1)
    tier.drop(Drop(b"model", "n"))
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert not all_keys(redis_server)


def test_a_drop_that_a_full_server_refuses_is_not_confirmed_and_tried_again(
    tier: RedisTier, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server of today refuses to delete; a proxy, or one of another make, may."""
    save(tier, NS, HASHES)

    def refuse(name: bytes, *keys: bytes) -> None:
        raise redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    store = TieredStore([tier], lambda: None)
    with monkeypatch.context() as full:
        full.setattr(tier._saves._redis, "hdel", refuse)
        forgetting = store.drop(Drop(b"model", "n"))
        assert store.flush(5)
        assert "used memory > 'maxmemory'" in forgetting.obstacles["redis"]
        assert not store.may_have(NS, HASHES[0]), "this process finds it no more"
        assert load(tier, NS, HASHES) == (24, None), "but other replicas would"
    deadline = time.monotonic() + 5
    while forgetting.obstacles and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not forgetting.obstacles
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    store.close()


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru", "allkeys-random"])
def test_an_evicting_server_gives_only_right_blocks(
    tier: RedisTier, redis_server: RedisServer, policy: str
) -> None:
    large = a_namespace(block_bytes=64 * 2**10)
    with redis_server.client() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", used + 8 * 2**20)
    chains = [chain(large, f"p{i}", 8) for i in range(60)]
    for hashes in chains:
        save(tier, large, hashes)
    num_found = sum(load(tier, large, hashes)[0] for hashes in chains)
    assert num_found * 64 * 2**10 < 8 * 2**20
    if policy != "volatile-lru":  # others may evict the namespaces, and then nothing is found
        return
    assert num_found > 0
    with redis_server.client() as client:  # hashes of evicted blocks do not pile up
        num_members = client.zcard(entry(redis_server, large).members)
        num_blocks = sum(key.startswith(PREFIX + b"block:") for key in client.scan_iter())
    assert num_members <= 3 * num_blocks


def test_namespaces_whose_blocks_were_evicted_do_not_pile_up(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("maxmemory", used + 4 * 2**20)
    for i in range(300):
        space = a_namespace(salt=f"of one session, {i}", block_bytes=64 * 2**10)
        save(tier, space, chain(space, "p", 2))
    assert load(tier, space, chain(space, "p", 2)) == (2, None)
    keys = all_keys(redis_server)
    num_blocks = sum(key.startswith(PREFIX + b"block:") for key in keys)
    num_members = sum(key.startswith(PREFIX + b"members:") for key in keys)
    assert 0 < num_blocks < 2 * 64
    with redis_server.client() as client:
        assert client.hlen(NAMESPACES) == num_members <= 3 * num_blocks


LIES = {
    "nothing": b"",
    "a little": b"x",
    "something else": b"x" * record_bytes(NS),
    "a cut record": records(NS, HASHES[2:3])[0].header,
    "another's record": b"".join(
        (records(NS, HASHES[5:6])[0].header, records(NS, HASHES[5:6])[0].payload)
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_not_believed_and_the_record_deleted(
    tier: RedisTier, redis_server: RedisServer, lie: str
) -> None:
    save(tier, NS, HASHES)
    key = entry(redis_server, NS).block(HASHES[2])
    with redis_server.client() as client:
        client.set(key, LIES[lie])
    count, cause = load(tier, NS, HASHES)
    assert count == 2
    assert cause is not None
    assert cause.is_refusal
    assert key not in all_keys(redis_server)
    assert tier.contents().quarantined == {cause.value: 1}
    assert save(tier, NS, HASHES) == 1
    assert load(tier, NS, HASHES) == (24, None)


def test_keys_of_another_type_are_an_error_or_a_miss(
    tier: RedisTier, redis_server: RedisServer
) -> None:
    save(tier, NS, HASHES)
    with redis_server.client() as client:
        client.delete(entry(redis_server, NS).block(HASHES[2]))
        client.rpush(entry(redis_server, NS).block(HASHES[2]), b"a list")
        assert load(tier, NS, HASHES) == (2, Cause.ABSENT)
        client.delete(PREFIX + b"namespaces")
        client.set(PREFIX + b"namespaces", b"a string")
    with pytest.raises(TierError, match="WRONGTYPE"):
        tier.load(NS, HASHES)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b""])
def test_a_server_that_speaks_something_else_is_an_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_all, args=(listener, answer))
        thread.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with open_tier(url, 0.5) as tier, pytest.raises(TierError, match="Redis: "):
            tier.load(NS, HASHES)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_a_server_says_of_an_error_is_one_short_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = b"-ERR no\x1b[2J\x00\xff" + b"x" * 10_000 + b"\r\n"
        thread = threading.Thread(target=answer_all, args=(listener, answer))
        thread.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with open_tier(url, 0.5) as tier, pytest.raises(TierError, match="Redis: no") as refused:
            tier.save(NS, records(NS, HASHES))
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def answer_all(listener: socket.socket, answer: bytes) -> None:
    """Answer whatever is said with the same, until the listener is shut down."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(0.2)
            try:
                while connection.recv(4096):
                    connection.sendall(answer)
                    if not answer:
                        break
            except OSError:
                continue


# ── access ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def password(redis_server: RedisServer) -> str:
    with redis_server.client() as client:
        client.config_set("requirepass", "open sesame")
    return "open sesame"


def opened(url: str, **settings: str) -> Tier:
    config = KVTierConfig(kv_redis_url=url, **settings)
    (tier,) = open_tiers(config, NO_KEYS)
    return tier


def secret_file(path: Path, text: str) -> str:
    (path / "secret").write_text(text)
    (path / "secret").chmod(0o600)
    return str(path / "secret")


def test_the_password_may_stand_in_a_file_or_in_the_environment(
    redis_server: RedisServer, password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = redis_server.url
    with pytest.raises(TierError, match="Authentication required"):
        save(opened(url), NS, HASHES)
    file = secret_file(tmp_path, password + "\n")
    save(opened(url, kv_redis_password_file=file), NS, HASHES)
    assert main(["kv", "verify", url, "--redis-password-file", file]) == 0
    assert main(["kv", "verify", url]) == 2
    monkeypatch.setenv("LORA_SERVE_KV_REDIS_PASSWORD", password)
    assert load(opened(url), NS, HASHES) == (24, None)
    assert main(["kv", "verify", url]) == 0


def test_two_passwords_are_refused(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "one")
    with pytest.raises(ConfigError, match="has a password, and another one is given") as error:
        opened("redis://:two@127.0.0.1:1", kv_redis_password_file=file)
    assert "two" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo"])
def test_a_password_file_that_holds_no_password_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="must hold one line, the password"):
        opened("redis://127.0.0.1:1", kv_redis_password_file=secret_file(tmp_path, text))


def test_a_password_that_looks_like_a_port_is_not_told() -> None:
    with pytest.raises(ConfigError, match="its port is no number") as error:
        opened("redis://user:pass/word@127.0.0.1:1")
    assert "pass/" not in str(error.value)


def certificate(path: Path) -> tuple[str, str]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    cert, key = str(path / "cert.pem"), str(path / "key.pem")
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
    if shutil.which("openssl") is None:
        pytest.skip("NO OPENSSL: TLS to Redis is not tested")
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_over_tls_the_server_must_be_who_the_given_authority_says(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path)
    port = free_port()
    with redis_server.client() as client:
        try:
            settings = {"tls-cert-file": cert, "tls-key-file": key, "tls-ca-cert-file": cert}
            client.config_set("tls-auth-clients", "no")
            client.config_set(*[part for pair in settings.items() for part in pair])
            client.config_set("tls-port", port)
        except redis.ResponseError as error:
            pytest.skip(f"THIS REDIS-SERVER HAS NO TLS: it is not tested ({error})")
    url = f"rediss://127.0.0.1:{port}/0"
    save(opened(f"{url}?ssl_ca_certs={cert}"), NS, HASHES)
    assert load(opened(f"{url}?ssl_ca_certs={cert}"), NS, HASHES) == (24, None)
    with pytest.raises(TierError, match="certificate verify failed"):
        load(opened(url), NS, HASHES)
