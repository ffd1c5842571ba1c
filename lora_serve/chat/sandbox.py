"""The Jinja that chat templates are written for, as transformers has it, and without that package.

Its import would take half a second of a start. A template is a program of the model's author: it
reaches what it is given and what is named here, and nothing of Python's own. Its time and memory
are bounded (`template_time.py`, `template_memory.py`).

Source: github.com/huggingface/transformers, src/transformers/utils/chat_template_utils.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from lora_serve.chat.bounded_jinja import BoundedEnvironment, bounded
from lora_serve.chat.template_memory import MAX_BYTES, need_text, within_memory
from lora_serve.chat.template_time import watch

Join = Callable[[Iterable[str]], str]

_MOST_DATE_CHARS = 1_000  # of the form that a date is written in


def compiled(source: str, join: Join) -> Template:
    """A template that joins what it writes with `join`; the same text is compiled once.

    Raises:
        TemplateSyntaxError: the text is no template.
    """
    return _compiled(source, join)


@lru_cache
def _compiled(source: str, join: Join) -> Template:
    environment = BoundedEnvironment([_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.bound_filter("tojson")
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _time_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.concat = join  # type: ignore[method-assign]
    tree = watch(environment, bounded(environment.parse(source)))
    tree.set_environment(environment)
    with within_memory(MAX_BYTES):
        code = environment.compile(tree)
    return Template.from_code(environment, code, environment.make_globals(None))


class _Generation(Extension):
    """`{% generation %}`, which marks what a model is trained to write: here a plain block."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """What templates know as `dict`: no type, whose attributes lead elsewhere."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which are Python's."""

    def __init__(*args: object, **items: object) -> None:  # so that a name may be `self`
        self, *rest = args
        attributes = dict(*rest, **items)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have the name {name[:80]!r}, which begins with an underscore"
        )


def _raise(message: object) -> NoReturn:
    need_text(message)
    raise TemplateError(str(message))


def _time_now(form: str) -> str:
    if len(form) > _MOST_DATE_CHARS:  # a field of five writes 255, and libc tries many lengths
        raise ValueError(
            f"the form of a date has {len(form):,} characters, above {_MOST_DATE_CHARS:,}"
        )
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
