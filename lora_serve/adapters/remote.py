"""Adapters that are downloaded before they are read: of the hub, or of a bucket of S3.

An object is fetched once: what lies whole on this disk under the same ETag is not fetched again.
Objects of one adapter come into a directory that is named by its URI and all their ETags and
appears whole. Beside them lie their checksums, and the adapter's digest once it was read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from lora_serve.adapters.checkpoint import CONFIG_NAME, DIGEST_NAME, WEIGHTS_NAME
from lora_serve.adapters.location import HubAdapter, RemoteAdapter, S3Adapter, download_from_hub
from lora_serve.config import LoRAConfig
from lora_serve.errors import AdapterError, AdapterNotFoundError, AdapterUnavailableError

FILES = (CONFIG_NAME, WEIGHTS_NAME, DIGEST_NAME)
S3_SECONDS = "10s"  # in which more of an answer must come
MAX_S3_RETRIES = 3
CHUNK_BYTES = 2**22
SUMS_NAME = "fetched.json"  # the SHA-256 of each file of a copy
READ_NAME = "read_digest.txt"  # the digest of the adapter that a copy held when it was last read
_UNFINISHED = "fetching-"
_UNFINISHED_SECONDS = 24 * 60 * 60.0  # after which no server fetches into it any more


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
    return download_from_s3(adapter, cache, *limits, config.lora_download_timeout)


def copies(adapter: RemoteAdapter, config: LoRAConfig, digest: str) -> list[str]:
    """Directories with what was fetched of an adapter before and may have this digest.

    Those of the hub are not known by their names: its client finds its own.
    """
    if isinstance(adapter, HubAdapter):
        return []
    return copies_of_s3(adapter, Path(config.lora_s3_cache_path).expanduser(), digest)


def note_digest(directory: str, digest: str) -> None:
    """Keep beside a copy of S3 which digest it has, so that it is read for no other digest."""
    note = Path(directory) / READ_NAME
    with suppress(OSError):  # then it is read again for each digest
        if _text_of(note) != digest:
            note.write_text(digest)


def is_below(path: str, place: str) -> bool:
    """Whether a path or URI lies below another, and no part of it leads back up."""
    rest = path.removeprefix(place.rstrip("/") + "/")
    return rest != path and ".." not in rest.split("/")


def download_from_s3(
    adapter: S3Adapter, cache: Path, max_bytes: int, max_cache_bytes: int, seconds: float
) -> str:
    """Fetch the files of an adapter of S3, unless the same are there; returns their directory.

    Where and as whom is S3's own configuration in the environment (AWS_…). max_bytes: of all of
    them; max_cache_bytes: of all adapters in the cache; seconds: after which nobody waits for it.
    """
    store, key = _opened(adapter, seconds)
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
        if not _is_whole(directory, found):
            _remove_unfinished(cache)
            _check_room(adapter, num_bytes, directory, max_cache_bytes)
            _fetch(store, key, found, directory)
    except (AdapterError, AdapterNotFoundError):
        raise
    except FileNotFoundError as error:
        raise AdapterNotFoundError(f"No adapter found for {adapter}") from error
    except Exception as error:  # of the client library, or of this disk
        reason = str(error).partition("\n")[0]
        raise AdapterUnavailableError(f"{adapter} could not be fetched: {reason}") from error
    return str(directory)


def copies_of_s3(adapter: S3Adapter, cache: Path, digest: str) -> list[str]:
    """The directories with copies of an adapter that had this digest when they were read last.

    The newest come first, and after them those that were never read.
    """
    found = []
    for one in cache.glob(f"{_beginning(adapter)}*"):
        with suppress(OSError):  # it was deleted meanwhile, or is a link to nowhere
            noted = _text_of(one / READ_NAME)
            if noted in ("", digest):
                found.append((noted, one.stat().st_mtime, str(one)))
    return [path for _, _, path in sorted(found, reverse=True)]


def _text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _is_whole(directory: Path, names: Mapping[str, object]) -> bool:
    """Whether a directory has all files, and each as it was fetched."""
    try:
        sums = msgspec.json.decode((directory / SUMS_NAME).read_bytes(), type=dict[str, str])
        return sums.keys() == names.keys() and all(
            _sum_of(directory / name) == one for name, one in sums.items()
        )
    except (OSError, msgspec.MsgspecError):
        return False


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beginning(adapter: S3Adapter) -> str:
    """How the names of the directories of an adapter's versions begin."""
    return hashlib.sha256(str(adapter).encode()).hexdigest()[:32] + "-"


def _remove_unfinished(cache: Path) -> None:
    """Remove what servers that were killed in a download have left."""
    for one in cache.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if max(file.stat().st_mtime for file in (one, *one.iterdir())) < (
                time.time() - _UNFINISHED_SECONDS
            ):
                shutil.rmtree(one, ignore_errors=True)


def _check_room(adapter: S3Adapter, num_bytes: int, directory: Path, max_cache_bytes: int) -> None:
    """Raise AdapterError if the cache would grow too large. directory: of what is fetched."""
    cache, held = directory.parent, 0
    for file in cache.glob("*/*"):
        with suppress(OSError):
            held += file.stat().st_size if file.is_file() and file.parent != directory else 0
    if held + num_bytes > max_cache_bytes:
        raise AdapterError(
            f"{adapter}: {num_bytes} bytes are to be downloaded, and adapters in {cache} have "
            f"{held} of --lora-hub-cache-bytes {max_cache_bytes}; delete some of them, or raise "
            "the limit"
        )


def _opened(adapter: S3Adapter, seconds: float) -> tuple[Any, str]:
    """A client of the adapter's bucket, and its key there."""
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise AdapterError(
            f"{adapter}: adapters of S3 need its client library: pip install 'lora-serve[s3]'"
        ) from error
    bucket, _, key = adapter.uri.removeprefix("s3://").partition("/")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    until = timedelta(seconds=seconds)
    options: dict[str, Any] = {
        "client_options": {"read_timeout": S3_SECONDS, "timeout": until},
        "retry_config": {"max_retries": MAX_S3_RETRIES, "retry_timeout": until},
    }
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    return S3Store(bucket, **options), key.strip("/")


def _listed(store: Any, key: str) -> dict[str, Mapping[str, Any]]:
    """What there is of an adapter's files, by their names, however much lies beside them."""
    found = {}
    for name in FILES:
        with suppress(FileNotFoundError):
            found[name] = store.head(f"{key}/{name}")
    return found


def _fetch(store: Any, key: str, found: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    """Bring the files into a directory that appears with all of them, also after a loss of power.

    A damaged copy that lies there is replaced.
    """
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory.parent))
    try:
        sums = {}
        for name, meta in found.items():
            # What is fetched is what was listed: another object by now has another ETag.
            got = store.get(f"{key}/{name}", options={"if_match": meta["e_tag"]})
            sums[name] = _write(got.stream(min_chunk_size=CHUNK_BYTES), made / name, meta["size"])
        (made / SUMS_NAME).write_bytes(msgspec.json.encode(sums))
        for path in (*made.iterdir(), made):
            _sync(path)
        if not _is_whole(directory, found):  # else another process was first
            _remove_at_once(directory)
            try:
                made.rename(directory)
            except OSError:
                if not _is_whole(directory, found):
                    raise
        _sync(directory.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(chunks: Iterable[bytes], path: Path, size: int) -> str:
    """Write what comes, which has this size; returns its SHA-256."""
    sha, num_written = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            num_written += len(chunk)
            if num_written > size:
                break
            sha.update(chunk)
            file.write(chunk)
    if num_written != size:
        came = "more" if num_written > size else f"{num_written}"
        raise OSError(f"{path.name} has {size} bytes, as S3 says, and {came} came")
    return sha.hexdigest()


def _remove_at_once(directory: Path) -> None:
    """Remove a copy, so that no reader finds a part of it."""
    with (
        tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=directory.parent) as away,
        suppress(FileNotFoundError),
    ):
        directory.rename(Path(away) / "copy")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
