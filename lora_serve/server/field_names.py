"""Errors that name a field as the body calls it that was sent.

A route may write its body as another route's, whose fields have other names.
"""

from __future__ import annotations

import re
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
        name = rf"\b{re.escape(field)}\b(?!')"  # "the prompt's length" is prose
        message = re.sub(name, lambda _: names[field], str(error), count=1)
        raise type(error)(message, names[field]) from error
