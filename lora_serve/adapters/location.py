"""Where an adapter's files lie: a directory, or a repository of the Hugging Face Hub.

With allowed roots nothing is downloaded, and a path that leads out of them is refused at once. That
files are opened below them alone, whatever is swapped meanwhile, is directory.py's to see to. Knows
nothing of what is in the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from lora_serve.adapters.directory import outside, root_of
from lora_serve.errors import AdapterNotFoundError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """A repository of the hub, "organisation/name"."""

    repo_id: str


def download_from_hub(
    adapter: HubAdapter, *, endpoint: str | None = None, cache_dir: str | None = None
) -> str:
    """Fetch an adapter's two files; returns their directory.

    Args:
        endpoint, cache_dir: where from and where to, if not as huggingface_hub is configured.

    Raises:
        AdapterNotFoundError: the hub has no such adapter, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            adapter.repo_id,
            allow_patterns=[CONFIG_NAME, WEIGHTS_NAME],
            endpoint=endpoint,
            cache_dir=cache_dir,
        )
    except Exception as error:  # of whichever HTTP library the installed client is built on
        reason = str(error).partition("\n")[0]
        raise AdapterNotFoundError(f"No adapter found for {adapter.repo_id}: {reason}") from error


def find_adapter(path: str, allowed_roots: Sequence[str] = ()) -> str | HubAdapter:
    """The real directory of the adapter that a user calls `path`, or what to download first.

    Args:
        path: a directory ("~" is expanded), or else a hub id such as "organisation/name".
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
    if allowed_roots or not _HUB_ID.fullmatch(path):
        raise AdapterNotFoundError(f"No adapter found for {path}")
    return HubAdapter(path)
