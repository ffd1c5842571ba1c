"""Bounds the processor time of a chat template: a loop of five words within another runs for hours.

Each turn of a loop, and each call, looks at the clock of its thread. What a template writes stays
the same. What a single filter does is not bounded: for templates of clients a process of their own
is (`text/request_templates.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from lora_serve.errors import InvalidRequestError

_WATCHED = "watched loop"  # no template can name a filter with a space
_end: ContextVar[tuple[float, float] | None] = ContextVar("_end", default=None)


class TemplateTimeError(InvalidRequestError):
    """The template takes too long with these messages."""


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """Let templates that are rendered here, in this thread, take so long; None: any time."""
    limit = None if seconds is None else (time.thread_time() + seconds, seconds)
    token = _end.set(limit)
    try:
        yield
    finally:
        _end.reset(token)


def watch(environment: SandboxedEnvironment, tree: nodes.Template) -> nodes.Template:
    """Have a parsed template look at the clock, and the calls of its environment, too."""
    environment.filters[_WATCHED] = _Watched
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, _WATCHED, [], [], None, None, lineno=loop.lineno)
    call: Callable[..., object] = environment.call

    def watched_call(*args: object, **kwargs: object) -> object:
        _look_at_the_clock()
        return call(*args, **kwargs)

    environment.call = watched_call  # type: ignore[method-assign]
    return tree


class _Watched:
    """What a loop goes over."""

    def __init__(self, items: Iterable[object]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(cast(Sized, self._items))

    def __iter__(self) -> Iterator[object]:
        for item in self._items:
            _look_at_the_clock()
            yield item


def _look_at_the_clock() -> None:
    limit = _end.get()
    if limit is not None and time.thread_time() > limit[0]:
        raise TemplateTimeError(
            f"the chat template takes more than {limit[1]:g} s of processor time with these "
            "messages; send fewer, or start the server with another --chat-template",
            "messages",
        )
