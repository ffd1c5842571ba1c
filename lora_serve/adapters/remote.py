"""Adapters that are downloaded before they are read: of the hub, or of a bucket of S3.

An object is fetched once: what lies on this disk under the same ETag is not fetched again. Objects
of one adapter come into a directory that is named by its URI and all their ETags and appears whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_serve.adapters.checkpoint import CONFIG_NAME, DIGEST_NAME, WEIGHTS_NAME
from lora_serve.adapters.location import HubAdapter, RemoteAdapter, S3Adapter, download_from_hub
from lora_serve.config import LoRAConfig
from lora_serve.errors import AdapterError, AdapterNotFoundError, AdapterUnavailableError

FILES = (CONFIG_NAME, WEIGHTS_NAME, DIGEST_NAME)
S3_SECONDS = "10s"  # for each answer; the whole download has --lora-download-timeout
CHUNK_BYTES = 2**22


def download(adapter: RemoteAdapter, config: LoRAConfig) -> str:
    """Fetch an adapter's files; returns their directory. May take for ever.

    Raises:
        AdapterNotFoundError, AdapterUnavailableError, AdapterError: there is none, it cannot be
            reached, or it is too large.
    """
    if isinstance(adapter, HubAdapter):
        limits = config.lora_max_download_bytes, config.lora_hub_cache_bytes
        return download_from_hub(adapter, *limits)
    cache = Path(config.lora_s3_cache_path).expanduser()
    limits = config.lora_max_download_bytes, config.lora_hub_cache_bytes
    return download_from_s3(adapter, cache, *limits)


def copies(adapter: RemoteAdapter, config: LoRAConfig) -> list[str]:
    """Directories with what was fetched of an adapter before, where they are known by its name."""
    if isinstance(adapter, HubAdapter):
        return []  # the hub's client finds its own
    return copies_of_s3(adapter, Path(config.lora_s3_cache_path).expanduser())


def is_below(path: str, place: str) -> bool:
    """Whether a path or URI lies below another, and no part of it leads back up."""
    rest = path.removeprefix(place.rstrip("/") + "/")
    return rest != path and ".." not in rest.split("/")


def download_from_s3(adapter: S3Adapter, cache: Path, max_bytes: int, max_cache_bytes: int) -> str:
    """Fetch the files of an adapter of S3, unless the same are there; returns their directory.

    Where and as whom is S3's own configuration in the environment (AWS_…). max_bytes: of all of
    them; max_cache_bytes: of all adapters in the cache.
    """
    store, key = _opened(adapter)
    try:
        found = _listed(store, key)
        if CONFIG_NAME not in found:
            raise AdapterNotFoundError(f"No adapter found for {adapter}: it has no {CONFIG_NAME}")
        num_bytes = sum(int(meta["size"]) for meta in found.values())
        if num_bytes > max_bytes:
            raise AdapterError(
                f"{adapter} has {num_bytes} bytes, more than --lora-max-download-bytes "
                f"{max_bytes}; raise the limit"
            )
        tags = [f"{name} {meta['e_tag']}" for name, meta in sorted(found.items())]
        version = hashlib.sha256("\n".join((str(adapter), *tags)).encode()).hexdigest()
        directory = cache / f"{_beginning(adapter)}{version}"
        if not directory.is_dir():
            _check_room(adapter, num_bytes, cache, max_cache_bytes)
            _fetch(store, key, found, directory)
    except (AdapterError, AdapterNotFoundError):
        raise
    except FileNotFoundError as error:
        raise AdapterNotFoundError(f"No adapter found for {adapter}") from error
    except Exception as error:  # of the client library, or of this disk
        reason = str(error).partition("\n")[0]
        raise AdapterUnavailableError(f"{adapter} could not be fetched: {reason}") from error
    return str(directory)


def copies_of_s3(adapter: S3Adapter, cache: Path) -> list[str]:
    """The directories with what was fetched of an adapter, the newest first."""
    found = cache.glob(f"{_beginning(adapter)}*")
    return [str(one) for one in sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)]


def _beginning(adapter: S3Adapter) -> str:
    """How the names of the directories of an adapter's versions begin."""
    return hashlib.sha256(str(adapter).encode()).hexdigest()[:32] + "-"


def _check_room(adapter: S3Adapter, num_bytes: int, cache: Path, max_cache_bytes: int) -> None:
    held = sum(file.stat().st_size for file in cache.glob("*/*") if file.is_file())
    if held + num_bytes > max_cache_bytes:
        raise AdapterError(
            f"{adapter}: {num_bytes} bytes are to be downloaded, and adapters in {cache} have "
            f"{held} of --lora-hub-cache-bytes {max_cache_bytes}; delete some of them, or raise "
            "the limit"
        )


def _opened(adapter: S3Adapter) -> tuple[Any, str]:
    """A client of the adapter's bucket, and its key there."""
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise AdapterError(
            f"{adapter}: adapters of S3 need its client library: pip install 'lora-serve[s3]'"
        ) from error
    bucket, _, key = adapter.uri.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    options: dict[str, Any] = {"client_options": {"timeout": S3_SECONDS}}
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    return S3Store(bucket, **options), key.strip("/")


def _listed(store: Any, key: str) -> dict[str, Mapping[str, Any]]:
    """What there is of an adapter's files, by their names; nothing below them is looked at."""
    listed = store.list_with_delimiter(f"{key}/")["objects"]
    found = {str(meta["path"]).rpartition("/")[2]: meta for meta in listed}
    return {name: found[name] for name in FILES if name in found}


def _fetch(store: Any, key: str, found: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    """Bring the files into a directory that appears with all of them."""
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(tempfile.mkdtemp(prefix="fetching-", dir=directory.parent))
    try:
        for name, meta in found.items():
            # What is fetched is what was listed: another object by now has another ETag.
            got = store.get(f"{key}/{name}", options={"if_match": meta["e_tag"]})
            with (made / name).open("wb") as file:
                for chunk in got.stream(min_chunk_size=CHUNK_BYTES):
                    file.write(chunk)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
