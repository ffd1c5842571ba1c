"""Errors that name a field as the body calls it that was sent.

A route may write its body as another route's, whose fields have other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lora_serve.errors import InvalidRequestError


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Have an InvalidRequestError from within name `names[field]` where it names `field`."""
    try:
        yield
    except InvalidRequestError as error:
        field = error.param or ""
        if field not in names:
            raise
        raise type(error)(str(error).replace(field, names[field], 1), names[field]) from error
