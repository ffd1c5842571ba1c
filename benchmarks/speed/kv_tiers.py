"""python -m benchmarks.speed.kv_tiers: how fast KV tiers save and load, beside the plain machine.

The blocks are those of a 0.5B model (24 layers, 2 KV heads of 64, bfloat16, 16 tokens: 192 KiB).
A load is a fetch as the engine makes it, checksums included, until its result can be taken; the
plain read is of the very same files, from first to last, into one buffer of 1 MiB. Cold: the
files have been dropped from the page cache. Both take turns, and the best turn of each counts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.busy import busy_cores
from benchmarks.common.facts import write_facts
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Drop, Tier, TierNamespace
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.mac import MIN_KEY_BYTES, MacKeys
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.redis.tier import RedisTier
from lora_serve.kv_tiers.store import TieredStore
from lora_serve.observability.table import text_table

BLOCK_BYTES = 24 * 2 * 2 * 64 * 16 * 2
TOKENS_PER_BLOCK = 16
PLAIN_READ_BYTES = 2**20
DEADLINE_SECONDS = 60.0
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One row. share: of the plain rate, where there is one to compare with."""

    what: str
    gb_per_second: float
    plain_gb_per_second: float | None = None

    @property
    def share(self) -> float | None:
        return self.plain_gb_per_second and self.gb_per_second / self.plain_gb_per_second


class Bench:
    """A prompt of `num_blocks` blocks of random bytes."""

    def __init__(self, num_blocks: int, num_turns: int, keys: MacKeys) -> None:
        self._num_turns = num_turns
        self.keys = keys
        self.namespace = TierNamespace(
            os.urandom(32), b"model", "adapter", b"digest", 0, b"", b"layout", BLOCK_BYTES
        )
        hashes = (hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(num_blocks))
        self.hashes = [BlockHash(block_hash) for block_hash in hashes]
        self.blocks = [(block_hash, os.urandom(BLOCK_BYTES)) for block_hash in self.hashes]
        self.num_bytes = num_blocks * BLOCK_BYTES

    def save(self, tier: Tier) -> float:
        """GB/s until everything is saved, once."""
        store = TieredStore([tier], lambda: None, keys=self.keys)
        try:
            start = time.perf_counter()
            for i in range(0, len(self.blocks), 128):  # as steps of 2,048 tokens bring them
                store.save(self.namespace, self.blocks[i : i + 128])
                assert store.flush(DEADLINE_SECONDS), "not saved in a minute"
            return self.num_bytes / GB / (time.perf_counter() - start)
        finally:
            store.close()

    def load(self, tier: Tier) -> float:
        """GB/s of one fetch of everything."""
        arrived = threading.Event()
        store = TieredStore([tier], arrived.set, keys=self.keys)
        try:
            store.flush(DEADLINE_SECONDS)
            start = time.perf_counter()
            store.fetch(1, self.namespace, self.hashes, DEADLINE_SECONDS)
            assert arrived.wait(DEADLINE_SECONDS), "not loaded in a minute"
            seconds = time.perf_counter() - start
            (result,) = store.take_results()
            assert len(result.blocks) == len(self.hashes), result.causes
            return self.num_bytes / GB / seconds
        finally:
            store.close()

    def best(self, *measures: Callable[[], float]) -> list[float]:
        """The best of each, measured in turns."""
        turns = [[measure() for measure in measures] for _ in range(self._num_turns)]
        return [max(rates) for rates in zip(*turns, strict=True)]


def ram_rates(bench: Bench) -> list[Rate]:
    class KeptRam(RamTier):
        """Outlives the stores of the turns."""

        def close(self) -> None: ...

    tier = KeptRam(4 * bench.num_bytes)
    save = bench.save(tier)
    (load,) = bench.best(lambda: bench.load(tier))
    return [
        Rate(what="RAM, save", gb_per_second=save),
        Rate(what="RAM, load", gb_per_second=load),
    ]


def disk_rates(bench: Bench, directory: Path) -> list[Rate]:
    def open_tier() -> DiskTier:
        tier = DiskTier(directory / "kv", 4 * bench.num_bytes, keys=bench.keys)
        tier.wait_until_indexed()
        return tier

    def group_files() -> list[Path]:
        return sorted((directory / "kv").glob("namespaces/*/*.kv"))

    def cold(measure: Callable[[], float]) -> Callable[[], float]:
        def act() -> float:
            drop_from_page_cache(group_files())
            return measure()

        return act

    def save() -> float:
        tier = open_tier()
        tier.drop(Drop(b"model"))
        return bench.save(tier)

    saved, written = bench.best(save, lambda: plain_write(bench, directory / "plain"))

    def ours() -> float:
        return bench.load(open_tier())

    def plain() -> float:
        return plain_read(group_files())

    cold_load, cold_read = bench.best(cold(ours), cold(plain))
    warm_load, warm_read = bench.best(ours, plain)
    return [
        Rate(what="disk, save", gb_per_second=saved, plain_gb_per_second=written),
        Rate(what="disk, load, cold", gb_per_second=cold_load, plain_gb_per_second=cold_read),
        Rate(what="disk, load, warm", gb_per_second=warm_load, plain_gb_per_second=warm_read),
    ]


def redis_rates(bench: Bench, url: str) -> list[Rate]:
    def open_tier() -> RedisTier:
        return RedisTier(url, DEADLINE_SECONDS, keys=bench.keys)

    save = bench.save(open_tier())
    (load,) = bench.best(lambda: bench.load(open_tier()))
    cleaner = RedisTier(url, DEADLINE_SECONDS)
    cleaner.drop(Drop(b"model", bench.namespace.lora_name))
    cleaner.close()
    return [
        Rate(what="Redis, save", gb_per_second=save),
        Rate(what="Redis, load", gb_per_second=load),
    ]


def plain_write(bench: Bench, path: Path) -> float:
    """GB/s of writing the same blocks to one file after another of 128, each synced."""
    start = time.perf_counter()
    for i in range(0, len(bench.blocks), 128):
        with path.open("wb", buffering=0) as file:
            for _, block in bench.blocks[i : i + 128]:
                file.write(block)
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return bench.num_bytes / GB / seconds


def plain_read(files: Sequence[Path]) -> float:
    buffer = bytearray(PLAIN_READ_BYTES)
    start, num_bytes = time.perf_counter(), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / GB / (time.perf_counter() - start)


def drop_from_page_cache(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(rates: Sequence[Rate]) -> str:
    rows = [
        (
            rate.what,
            f"{rate.gb_per_second:.2f}",
            f"{rate.plain_gb_per_second:.2f}" if rate.plain_gb_per_second else "–",
            f"{rate.share:.0%}" if rate.share else "–",
        )
        for rate in rates
    ]
    return text_table(("GB/s", "tier", "plain", "share"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_000, help="Length of the prompt.")
    parser.add_argument("--turns", type=int, default=5, help="Turns of each measure.")
    parser.add_argument("--path", type=Path, help="A directory on the disk to measure.")
    parser.add_argument("--redis-url", help="A Redis or Valkey to measure, too.")
    parser.add_argument("--mac", action="store_true", help="Sign KV, as with --kv-mac-key-file.")
    parser.add_argument("--out", type=Path, help="Where to write the JSON.")
    arguments = parser.parse_args()
    busy = busy_cores()
    keys = MacKeys([os.urandom(MIN_KEY_BYTES)] if arguments.mac else ())
    bench = Bench(arguments.tokens // TOKENS_PER_BLOCK, arguments.turns, keys)
    rates = ram_rates(bench)
    with tempfile.TemporaryDirectory(dir=arguments.path) as directory:
        rates += disk_rates(bench, Path(directory))
    if arguments.redis_url:
        rates += redis_rates(bench, arguments.redis_url)
    print(f"{arguments.tokens:,} tokens, {bench.num_bytes / GB:.2f} GB\n{table(rates)}")
    write_facts(
        arguments.out,
        busy_cores_before=busy,
        tokens=arguments.tokens,
        is_signed=arguments.mac,
        num_bytes=bench.num_bytes,
        rates=rates,
    )


if __name__ == "__main__":
    main()
