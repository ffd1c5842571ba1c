"""Where an adapter's files lie: a directory, or a repository of the Hugging Face Hub.

With allowed roots nothing is downloaded, and a path that leads out of them is refused at once. That
files are opened below them alone, whatever is swapped meanwhile, is directory.py's to see to. Knows
nothing of what is in the files.
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


def download_from_hub(
    adapter: HubAdapter,
    max_bytes: int,
    *,
    endpoint: str | None = None,
    cache_dir: str | None = None,
) -> str:
    """Fetch an adapter's two files, and nothing else; returns their directory.

    What the hub says of their sizes is checked before either is fetched, and they are those of the
    commit that was checked.

    Args:
        max_bytes: of both together.
        endpoint, cache_dir: where from and where to, if not as huggingface_hub is configured.

    Raises:
        AdapterNotFoundError: the hub has no such adapter, or cannot be reached.
        AdapterError: it is too large, or the hub does not say how large it is.
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
        sizes = {
            file.rfilename: file.size
            for file in info.siblings or ()
            if file.rfilename in (CONFIG_NAME, WEIGHTS_NAME)
        }
        _check_sizes(adapter, sizes, max_bytes)
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


def _check_sizes(adapter: HubAdapter, sizes: Mapping[str, int | None], max_bytes: int) -> None:
    known = [size for size in sizes.values() if size is not None]
    if len(known) < len(sizes):
        raise AdapterError(f"{adapter}: the hub does not say how large it is; download it yourself")
    if sum(known) > max_bytes:
        raise AdapterError(
            f"{adapter} has {sum(known)} bytes, more than --lora-max-download-bytes {max_bytes}; "
            "raise the limit, or download it yourself"
        )


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
        raise AdapterNotFoundError(f"No adapter found for {path}")
    return HubAdapter(hub_id[1], hub_id[2])
