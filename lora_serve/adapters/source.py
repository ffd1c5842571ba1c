"""Where adapters come from: directories, the hub and buckets, as far as the settings allow them.

What is here is called in the loader's threads (`loader.py`), and may take for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.adapters.location import (
    AdapterCopy,
    HubAdapter,
    RemoteAdapter,
    S3Adapter,
    find_adapter,
)
from lora_serve.adapters.remote import copies, download, is_below, note_digest
from lora_serve.config import LoRAConfig
from lora_serve.errors import HubNotAllowedError, LoraServeError
from lora_serve.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """How adapters are read and downloaded.

    read: the checkpoint at a path, or what has to be downloaded first. download: its directory.
    read_copy: the checkpoint in such a directory. copies: directories with what was downloaded of
    an adapter before and has had this digest.
    """

    read: Callable[[str], AdapterCheckpoint | RemoteAdapter]
    download: Callable[[RemoteAdapter], str]
    read_copy: Callable[[AdapterCopy], AdapterCheckpoint]
    copies: Callable[[RemoteAdapter, str], Sequence[str]] = lambda adapter, digest: ()

    def get(
        self, place: str | RemoteAdapter | AdapterCopy, digest: str
    ) -> AdapterCheckpoint | RemoteAdapter | AdapterCopy:
        """Read what lies there, or download it. digest: which is wanted, in hexadecimal, or ""."""
        if isinstance(place, AdapterCopy):
            return self.read_copy(place)
        if not isinstance(place, str):
            return AdapterCopy(self.download(place), place)
        found = self.read(place)
        if isinstance(found, AdapterCheckpoint) or not digest:
            return found
        return self._kept(found, digest) or found

    def _kept(self, adapter: RemoteAdapter, digest: str) -> AdapterCheckpoint | None:
        """What was downloaded before, if it has the digest: then the place is not asked for it."""
        for directory in self.copies(adapter, digest):
            copy = None  # frees one before the next is read
            with suppress(LoraServeError):  # a copy that cannot be used is none
                copy = self.read_copy(AdapterCopy(directory, adapter))
                if copy.digest.hex() == digest:
                    return copy
        return None


def make_source(config: LoRAConfig, model: ModelInfo) -> AdapterSource:
    """A source of checkpoints that fit this model and these limits."""
    operators_own = {path for _, path in config.modules}

    def read_directory(path: str, roots: Sequence[str]) -> AdapterCheckpoint:
        return read_adapter(
            path,
            lora_modules=model.lora_modules,
            max_lora_rank=config.max_lora_rank,
            vocabulary=model.vocabulary,
            max_vocab_bytes=config.max_lora_vocab_bytes,
            max_expert_rank=config.max_lora_expert_rank,
            allowed_roots=roots,
        )

    def read(path: str) -> AdapterCheckpoint | RemoteAdapter:
        if any(is_below(path, place) for place in config.resolver_buckets):
            return S3Adapter(path)
        roots = _roots_of(path, config)
        found = find_adapter(path, roots)
        if isinstance(found, str):
            return read_directory(found, roots)
        if not {path, path.partition("@")[0]} & operators_own and not config.lora_allow_hub:
            raise HubNotAllowedError(
                f"No adapter found for {path}: there is no such directory, and the hub is only "
                "asked where the server was started with --lora-allow-hub",
                "lora_path",
            )
        return found

    def read_copy(copy: AdapterCopy) -> AdapterCheckpoint:
        found = os.path.realpath(copy.directory)
        if isinstance(copy.origin, HubAdapter):
            return read_directory(found, ())
        checkpoint = read_directory(found, (config.lora_s3_cache_path,))
        note_digest(found, checkpoint.digest.hex())
        # It is known by its URI: when it was evicted and its copy is damaged, it is fetched anew.
        return replace(checkpoint, path=str(copy.origin))

    return AdapterSource(
        read,
        lambda adapter: download(adapter, config),
        read_copy,
        lambda adapter, digest: copies(adapter, config, digest),
    )


def _roots_of(path: str, config: LoRAConfig) -> tuple[str, ...]:
    """Where all that is read of an adapter must lie: below what it was resolved from, if it was."""
    places = [os.path.abspath(os.path.expanduser(one)) for one in config.resolver_directories]
    below = tuple(place for place in places if is_below(os.path.abspath(path), place))
    return below[:1] or config.lora_allowed_roots
