"""Where an adapter's files lie: a directory, a repository of the Hugging Face Hub, or a bucket.

With allowed roots nothing is downloaded from the hub, and a path that leads out of them is refused
at once. That files are opened below them alone, whatever is swapped meanwhile, is directory.py's to
see to; remote.py fetches from buckets. Knows nothing of what is in the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_serve.adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.adapters.directory import outside, root_of
from lora_serve.errors import AdapterError, AdapterNotFoundError

HUB_SECONDS = 10.0  # for each answer of the hub; the whole download has --lora-download-timeout
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """A repository of the hub, "organisation/name"; of its main branch if no revision is given."""

    repo_id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class S3Adapter:
    """A "directory" of a bucket, as s3://BUCKET/PATH."""

    uri: str

    def __str__(self) -> str:
        return self.uri


RemoteAdapter = HubAdapter | S3Adapter


@dataclass(frozen=True, slots=True)
class AdapterCopy:
    """A directory of this disk that holds what was downloaded of an adapter."""

    directory: str
    origin: RemoteAdapter


def download_from_hub(
    adapter: HubAdapter,
    max_bytes: int,
    max_cache_bytes: int,
    *,
    endpoint: str | None = None,
    cache_dir: str | None = None,
) -> str:
    """Fetch an adapter's two files, and nothing else; returns their directory.

    What the hub says of their sizes is checked before either is fetched, and they are those of the
    commit that was checked.

    Args:
        max_bytes: of both together.
        max_cache_bytes: of all adapters in the cache, with what has to be fetched. It is checked
            before a download, so several at once may pass it by what each fetches.
        endpoint, cache_dir: where from and where to, if not as huggingface_hub is configured.

    Raises:
        AdapterNotFoundError: the hub has no such adapter, or cannot be reached.
        AdapterError: it is too large, the hub does not say how large it is, or the cache is full.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint)
    try:
        info = hub.model_info(
            adapter.repo_id,
            revision=adapter.revision,
            files_metadata=True,
            timeout=HUB_SECONDS,
        )
        listed = {file.rfilename: file.size for file in info.siblings or ()}
        sizes = {name: listed[name] for name in listed if name in (CONFIG_NAME, WEIGHTS_NAME)}
        known = _checked_sizes(adapter, sizes, max_bytes)
        num_missing = _num_missing_bytes(adapter, info.sha, known, cache_dir)
        if num_missing:
            _check_room(adapter, num_missing, max_cache_bytes, cache_dir)
        paths = [
            hub.hf_hub_download(
                adapter.repo_id,
                name,
                revision=info.sha,
                cache_dir=cache_dir,
                etag_timeout=HUB_SECONDS,
            )
            for name in sizes
        ]
    except AdapterError:
        raise
    except Exception as error:  # of whichever HTTP library the installed client is built on
        reason = str(error).partition("\n")[0]
        raise AdapterNotFoundError(f"No adapter found for {adapter}: {reason}") from error
    if not paths:
        raise AdapterNotFoundError(f"No adapter found for {adapter}: it has no {CONFIG_NAME}")
    return os.path.dirname(paths[0])


def _num_missing_bytes(
    adapter: HubAdapter, commit: str | None, sizes: Mapping[str, int], cache_dir: str | None
) -> int:
    """How much of these files is not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    def is_cached(name: str) -> bool:
        found = try_to_load_from_cache(adapter.repo_id, name, cache_dir, commit)
        return isinstance(found, str)

    return sum(size for name, size in sizes.items() if not is_cached(name))


def _checked_sizes(
    adapter: HubAdapter, sizes: Mapping[str, int | None], max_bytes: int
) -> dict[str, int]:
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(known) < len(sizes):
        raise AdapterError(f"{adapter}: the hub does not say how large it is; download it yourself")
    num_bytes = sum(known.values())
    if num_bytes > max_bytes:
        raise AdapterError(
            f"{adapter} has {num_bytes} bytes, more than --lora-max-download-bytes {max_bytes}; "
            "raise the limit, or download it yourself"
        )
    return known


def _check_room(
    adapter: HubAdapter, num_bytes: int, max_cache_bytes: int, cache_dir: str | None
) -> None:
    num_held = _bytes_of_cached_adapters(cache_dir)
    if num_held + num_bytes > max_cache_bytes:
        raise AdapterError(
            f"{adapter}: {num_bytes} bytes are to be downloaded, and adapters in the hub's cache "
            f"have {num_held} of --lora-hub-cache-bytes {max_cache_bytes}; delete some of them "
            "there (`hf cache`), or raise the limit"
        )


def _bytes_of_cached_adapters(cache_dir: str | None) -> int:
    """What repositories that hold an adapter take on disk; models are not counted."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return 0
    return sum(
        repo.size_on_disk
        for repo in repos
        if any(file.file_name == CONFIG_NAME for one in repo.revisions for file in one.files)
    )


def _seen_from(path: str) -> str:
    """Where a path that is not absolute begins, which callers elsewhere may not know."""
    return "" if path.startswith(("/", "~")) else "; it begins where the server was started"


def is_hub_id(text: str) -> bool:
    """Whether this has a hub id's form: "organisation/name", or with "@revision" behind it."""
    return _HUB_ID.fullmatch(text) is not None


def find_adapter(path: str, allowed_roots: Sequence[str] = ()) -> str | HubAdapter:
    """The real directory of the adapter that a user calls `path`, or what to download first.

    Args:
        path: a directory ("~" is expanded), or else a hub id, "organisation/name" or
            "organisation/name@revision".
        allowed_roots: directories below which adapters must lie; anywhere if empty.

    Raises:
        AdapterNotFoundError: it is neither a directory nor a hub id.
        AdapterError: it lies outside `allowed_roots`.
    """
    if "\0" in path or path != path.encode(errors="replace").decode():  # lone surrogates
        raise AdapterNotFoundError(f"No adapter found for {path!r}")
    local = os.path.expanduser(path)
    if allowed_roots and root_of(os.path.realpath(local), allowed_roots) is None:
        raise outside(path, allowed_roots)
    if os.path.isdir(local):
        return os.path.realpath(local)
    hub_id = _HUB_ID.fullmatch(path)
    if allowed_roots or hub_id is None:
        raise AdapterNotFoundError(
            f"No adapter found for {path}: there is no such directory{_seen_from(path)}"
        )
    return HubAdapter(hub_id[1], hub_id[2])
