"""Adapters of S3, against a stand-in; and what is read below the places of --lora-resolver."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import DIGEST_NAME, read_adapter
from lora_serve.adapters.lanes import LoadJob
from lora_serve.adapters.loader import AdapterLoader, make_loader
from lora_serve.adapters.location import S3Adapter
from lora_serve.adapters.manager import AdapterManager
from lora_serve.adapters.registry import adapter_info
from lora_serve.adapters.remote import download_from_s3, is_below
from lora_serve.config import LoRAConfig
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoraServeError,
)
from lora_serve.identity import AdapterRef
from lora_serve.messages import LoadAdapter
from lora_serve.model_info import ModelInfo
from tests.adapters.conftest import Shapes
from tests.fakes.adapter_files import lora_tensors, write_adapter

MANY = 2**30
PATIENCE = 60


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A bucket `adapters` of a server of the tests' own, which the environment names."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"])
        client.create_bucket(Bucket="adapters")
        yield client
        client.close()
    server.stop()


def put(s3: Any, key: str, directory: str) -> str:
    """Lay an adapter's files into the bucket; its URI."""
    for file in Path(directory).iterdir():
        s3.put_object(Bucket="adapters", Key=f"{key}/{file.name}", Body=file.read_bytes())
    return f"s3://adapters/{key}"


def read(
    path: str, config: LoRAConfig, lora_modules: Shapes, digest: str = ""
) -> AdapterCheckpoint | LoraServeError:
    """What an engine's loader makes of a load from this path, with this digest if it names one."""
    notified = threading.Event()
    with closing(loader_of(config, lora_modules, notified)) as loader:
        loader.submit(LoadJob(path, LoadAdapter(1, "name", path, digest=digest)))
        while True:
            if results := loader.take_results():
                return results[0].outcome
            assert notified.wait(PATIENCE), "the loader does not end"
            notified.clear()


def loader_of(config: LoRAConfig, lora_modules: Shapes, notified: threading.Event) -> AdapterLoader:
    model = ModelInfo(
        fingerprint=b"",
        dtype="float32",
        vocab_size=1,
        hidden_size=1,
        max_model_len=1,
        num_blocks=1,
        kernels="",
        lora_modules=lora_modules,
    )
    return make_loader(config, model, lambda checkpoint: None, notified.set)


def read_again(loaded: AdapterCheckpoint, config: LoRAConfig, lora_modules: Shapes) -> str:
    """The digest that is back for the next request of an evicted adapter, or why none is."""
    notified = threading.Event()
    with closing(AdapterManager(config, loader_of(config, lora_modules, notified))) as manager:
        evicted = adapter_info(AdapterRef("a", loaded.digest), loaded)
        manager.restore([evicted], {})
        manager.request_load(manager.acquire("a"))
        while True:
            events = manager.take_events()
            if events.back:
                return events.back[0].digest.hex()
            if events.lost:
                return type(events.lost[0][1]).__name__
            assert notified.wait(PATIENCE), "the loader does not end"
            notified.clear()


def test_an_adapter_of_s3_is_loaded_from_below_its_prefix(
    s3: Any, tmp_path: Path, lora_modules: Shapes
) -> None:
    local = write_adapter(tmp_path / "a", lora_tensors(lora_modules))
    uri = put(s3, "tenants/org/a", local)
    config = LoRAConfig(
        enable_lora=True,
        lora_resolver=("s3://adapters/tenants",),
        lora_s3_cache_path=str(tmp_path / "cache"),
        lora_allowed_roots=(str(tmp_path / "elsewhere"),),
    )
    found = read(uri, config, lora_modules)
    assert isinstance(found, AdapterCheckpoint), found
    wanted = read_adapter(local, lora_modules=lora_modules, max_lora_rank=64)
    assert found.digest == wanted.digest
    for other in ("s3://adapters/others/a", "s3://adapters/tenants/../others/a"):
        assert isinstance(read(other, config, lora_modules), LoraServeError), other
    missing = read("s3://adapters/tenants/none", config, lora_modules)
    assert isinstance(missing, AdapterNotFoundError)


def test_what_was_fetched_is_fetched_again_only_when_it_has_changed(
    s3: Any, tmp_path: Path, lora_modules: Shapes
) -> None:
    cache = tmp_path / "cache"
    adapter = S3Adapter(put(s3, "a", write_adapter(tmp_path / "a", lora_tensors(lora_modules))))
    first = download_from_s3(adapter, cache, MANY, MANY, PATIENCE)
    kept = os.stat(first).st_ino
    assert download_from_s3(adapter, cache, MANY, MANY, PATIENCE) == first
    assert os.stat(first).st_ino == kept
    put(s3, "a", write_adapter(tmp_path / "b", lora_tensors(lora_modules, seed=1)))
    second = download_from_s3(adapter, cache, MANY, MANY, PATIENCE)
    assert second != first
    assert {path.name for path in cache.iterdir()} == {Path(first).name, Path(second).name}


def test_a_copy_of_the_digest_that_is_asked_for_is_used_without_s3(
    s3: Any, tmp_path: Path, lora_modules: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog says which digest; a server that starts while S3 is away has it here already."""
    config = LoRAConfig(
        enable_lora=True,
        lora_resolver=("s3://adapters/kept",),
        lora_s3_cache_path=str(tmp_path / "cache"),
        lora_allowed_roots=(str(tmp_path / "elsewhere"),),
    )
    digests = []
    for seed in (0, 1):
        uri = put(
            s3, "kept/a", write_adapter(tmp_path / "a", lora_tensors(lora_modules, seed=seed))
        )
        fetched = read(uri, config, lora_modules)
        assert isinstance(fetched, AdapterCheckpoint), fetched
        digests.append(fetched.digest.hex())
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for digest in digests:
        kept = read(uri, config, lora_modules, digest)
        assert isinstance(kept, AdapterCheckpoint), kept
        assert kept.digest.hex() == digest
    other = read(uri, config, lora_modules, "ab" * 32)
    assert isinstance(other, AdapterUnavailableError), "S3 must be asked for what is not here"
    for directory in (tmp_path / "cache").iterdir():
        write_adapter(directory, lora_tensors(lora_modules, seed=2))
    damaged = read(uri, config, lora_modules, digests[0])
    assert isinstance(damaged, AdapterUnavailableError), "a copy must have the digest"


@pytest.fixture
def kept(tmp_path: Path) -> LoRAConfig:
    """Loads from s3://adapters/kept, with a cache that a link leads to."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    return LoRAConfig(
        enable_lora=True,
        lora_resolver=("s3://adapters/kept",),
        lora_s3_cache_path=str(tmp_path / "cache"),
    )


def put_versions(
    s3: Any, key: str, tmp_path: Path, config: LoRAConfig, lora_modules: Shapes, num: int
) -> tuple[str, list[str]]:
    """Load so many versions of an adapter one after another; its URI, and their digests."""
    digests = []
    for seed in range(num):
        local = write_adapter(tmp_path / "a", lora_tensors(lora_modules, seed=seed))
        loaded = read(uri := put(s3, key, local), config, lora_modules)
        assert isinstance(loaded, AdapterCheckpoint), loaded
        digests.append(loaded.digest.hex())
    return uri, digests


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1000])
def test_a_damaged_copy_is_fetched_again(
    s3: Any, tmp_path: Path, kept: LoRAConfig, lora_modules: Shapes, asks: bool, num_bytes: int
) -> None:
    uri, [digest] = put_versions(s3, "kept/damaged", tmp_path, kept, lora_modules, 1)
    [weights] = (tmp_path / "cache").glob("*/adapter_model.safetensors")
    whole = weights.read_bytes()
    damaged = whole[:num_bytes] and whole[:-1] + bytes([whole[-1] ^ 1])
    weights.write_bytes(damaged)
    again = read(uri, kept, lora_modules, digest if asks else "")
    assert isinstance(again, AdapterCheckpoint), again
    assert again.digest.hex() == digest
    assert weights.read_bytes() == whole
    assert len(list((tmp_path / "cache").iterdir())) == 1, "the damaged copy must not stay"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None], ids=["empty", "other bytes", "gone"])
def test_an_evicted_adapter_whose_copy_is_damaged_comes_back_by_a_new_copy(
    s3: Any, tmp_path: Path, kept: LoRAConfig, lora_modules: Shapes, damage: bytes | None
) -> None:
    """damage: what its weights are overwritten with; None takes the whole copy away."""
    uri, [digest] = put_versions(s3, "kept/evicted", tmp_path, kept, lora_modules, 1)
    loaded = read(uri, kept, lora_modules)
    assert isinstance(loaded, AdapterCheckpoint), loaded
    [weights] = (tmp_path / "cache").glob("*/adapter_model.safetensors")
    whole = weights.read_bytes()
    if damage is None:
        shutil.rmtree(weights.parent)
    else:
        weights.write_bytes(whole[: -len(damage)] + damage if damage else b"")
    assert read_again(loaded, kept, lora_modules) == digest
    assert weights.read_bytes() == whole


def test_an_evicted_adapter_comes_back_without_s3_and_never_as_another_version(
    s3: Any,
    tmp_path: Path,
    kept: LoRAConfig,
    lora_modules: Shapes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, [digest] = put_versions(s3, "kept/moved", tmp_path, kept, lora_modules, 1)
    loaded = read(uri, kept, lora_modules)
    assert isinstance(loaded, AdapterCheckpoint), loaded
    put(s3, "kept/moved", write_adapter(tmp_path / "b", lora_tensors(lora_modules, seed=1)))
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
        assert read_again(loaded, kept, lora_modules) == digest
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    assert read_again(loaded, kept, lora_modules) == "AdapterChangedError"
    shutil.rmtree(tmp_path / "disk")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert read_again(loaded, kept, lora_modules) == "AdapterUnavailableError"


def test_of_many_copies_the_one_with_the_digest_is_read_alone(
    s3: Any,
    tmp_path: Path,
    kept: LoRAConfig,
    lora_modules: Shapes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, digests = put_versions(s3, "kept/many", tmp_path, kept, lora_modules, 3)
    num_reads = 0

    def counted(*places: Any, **options: Any) -> AdapterCheckpoint:
        nonlocal num_reads
        num_reads += 1
        return read_adapter(*places, **options)

    monkeypatch.setattr("lora_serve.adapters.source.read_adapter", counted)
    oldest = read(uri, kept, lora_modules, digests[0])
    assert isinstance(oldest, AdapterCheckpoint), oldest
    assert num_reads == 1
    assert isinstance(read(uri, kept, lora_modules, "ab" * 32), AdapterChangedError)
    assert num_reads == 2, "a digest that no copy has is looked for in S3 alone"


def test_a_link_to_nowhere_among_the_copies_is_no_copy(
    s3: Any, tmp_path: Path, kept: LoRAConfig, lora_modules: Shapes
) -> None:
    uri, [digest] = put_versions(s3, "kept/linked", tmp_path, kept, lora_modules, 1)
    [copy] = (tmp_path / "disk").iterdir()
    copy.with_name(copy.name[:33] + "nowhere").symlink_to("nowhere")
    for wanted in (digest, ""):
        assert isinstance(read(uri, kept, lora_modules, wanted), AdapterCheckpoint)


def test_what_killed_downloads_left_is_removed_after_a_day(
    s3: Any, tmp_path: Path, kept: LoRAConfig, lora_modules: Shapes
) -> None:
    cache = tmp_path / "cache"
    for name, age in (("old", 90_000), ("young", 80_000)):
        (cache / f"fetching-{name}").mkdir()
        part = cache / f"fetching-{name}" / "adapter_model.safetensors"
        part.write_bytes(bytes(5000))
        for path in (part, part.parent):
            os.utime(path, (time.time() - age,) * 2)
    put_versions(s3, "kept/left", tmp_path, kept, lora_modules, 1)
    assert [path.name for path in cache.glob("fetching-*")] == ["fetching-young"]


def test_an_adapter_that_is_too_large_is_not_fetched(
    s3: Any, tmp_path: Path, lora_modules: Shapes
) -> None:
    adapter = S3Adapter(put(s3, "big", write_adapter(tmp_path / "a", lora_tensors(lora_modules))))
    with pytest.raises(AdapterError, match="more than --lora-max-download-bytes 100"):
        download_from_s3(adapter, tmp_path / "cache", 100, MANY, PATIENCE)
    with pytest.raises(AdapterError, match="of --lora-hub-cache-bytes 100"):
        download_from_s3(adapter, tmp_path / "cache", MANY, 100, PATIENCE)
    assert not (tmp_path / "cache").exists()


def test_a_bucket_that_is_not_there_is_no_fault_of_the_adapter(s3: Any, tmp_path: Path) -> None:
    with pytest.raises((AdapterUnavailableError, AdapterNotFoundError)):
        download_from_s3(S3Adapter("s3://nowhere/a"), tmp_path, MANY, MANY, PATIENCE)


def test_what_is_resolved_in_a_directory_lies_below_it(
    tmp_path: Path, lora_modules: Shapes
) -> None:
    outside = write_adapter(tmp_path / "outside", lora_tensors(lora_modules))
    inside = write_adapter(tmp_path / "adapters" / "a", lora_tensors(lora_modules))
    (tmp_path / "adapters" / "link").symlink_to(outside)
    config = LoRAConfig(enable_lora=True, lora_resolver=(f"dir:{tmp_path}/adapters",))
    assert isinstance(read(inside, config, lora_modules), AdapterCheckpoint)
    refused = read(str(tmp_path / "adapters" / "link"), config, lora_modules)
    assert isinstance(refused, AdapterError), refused
    assert isinstance(read(outside, config, lora_modules), AdapterCheckpoint)  # an operator's


def test_what_was_fetched_from_s3_is_loaded_by_its_uri_alone(
    s3: Any, tmp_path: Path, kept: LoRAConfig, lora_modules: Shapes
) -> None:
    """Its copy lies outside of --lora-allowed-roots, also where no bucket is named any more."""
    put_versions(s3, "kept/copied", tmp_path, kept, lora_modules, 1)
    [copy] = (tmp_path / "disk").iterdir()
    for resolver in ((), kept.lora_resolver):
        config = replace(
            kept, lora_resolver=resolver, lora_allowed_roots=(str(tmp_path / "elsewhere"),)
        )
        for path in (copy, tmp_path / "cache" / copy.name):
            refused = read(str(path), config, lora_modules)
            assert isinstance(refused, AdapterError), refused
            assert "does not lie below --lora-allowed-roots" in str(refused)


def test_a_digest_beside_the_weights_must_be_theirs(tmp_path: Path, lora_modules: Shapes) -> None:
    path = write_adapter(tmp_path / "a", lora_tensors(lora_modules))
    found = read_adapter(path, lora_modules=lora_modules, max_lora_rank=64).digest.hex()
    sidecar = Path(path) / DIGEST_NAME
    sidecar.write_text(f"{found}\n")
    read_adapter(path, lora_modules=lora_modules, max_lora_rank=64)
    sidecar.write_text("ab" * 32)
    with pytest.raises(AdapterChangedError, match=f"has the digest {found}, and its") as caught:
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=64)
    assert caught.value.found_digest == found


def test_what_lies_below_a_place() -> None:
    assert is_below("s3://b/p/a", "s3://b/p")
    assert is_below("/adapters/a", "/adapters/")
    for other in ("s3://b/pa", "s3://b/p", "s3://b/p/../q", "/adaptersx/a"):
        assert not is_below(other, "s3://b/p"), other
