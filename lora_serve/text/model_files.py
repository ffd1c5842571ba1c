"""Finds the files that lie beside a model, in a directory or on the hub."""

from __future__ import annotations

from pathlib import Path

from lora_serve.gguf.location import hub_parts


def model_file(source: str, revision: str | None, filename: str) -> Path | None:
    """A file of a model directory or hub repository; None if it has none, or cannot be asked."""
    directory = Path(source).expanduser()
    if directory.is_file() or hub_parts(source):  # a GGUF file has all in itself
        return None
    if directory.is_dir():
        path = directory / filename
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file  # half a second that no directory needs

    try:
        found = cached_file(
            source,
            filename,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no hub id; who reads the model itself says so
        return None
    return None if found is None else Path(found)
