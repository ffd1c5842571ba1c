"""A Jinja sandbox whose templates are held to the room of `template_memory.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from lora_serve.chat.template_growth import (
    FILTERS,
    METHODS,
    OPERATORS,
    check_field,
    check_format,
    counted,
)
from lora_serve.chat.template_memory import charge_value, need_text

_MADE, _JOINED = "made value", "joined texts"  # no template can name a filter with a space
_MOST_LITERALS = 16  # of a list in a template that are not counted each time
_CHECKED = tuple(METHODS)
_AT_HAND = (str, list, tuple, dict)
_TAKE_ALL = frozenset(("join", "sum"))  # filters that take all of a generator at once


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile what `bounded` returns, and render it, within `within_memory`."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, extensions: Sequence[Any]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written
        )
        del self.globals["lipsum"]  # random text, as much as is asked for
        for name in list(self.filters):
            self.bound_filter(name)
        self.filters |= {_MADE: _made_again, _JOINED: _joined}

    def bound_filter(self, name: str) -> None:
        """Hold a filter of the environment to the room."""
        self.filters[name] = _bounded_filter(name, self.filters[name])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check = OPERATORS[operator]
        if check is not None:
            check(left, right)
        value = self.binop_table[operator](left, right)
        charge_value(value)
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        form, is_map = value.__self__, value.__name__ == "format_map"
        formatter = (
            _EscapeFormatter(self, escape=form.escape)
            if isinstance(form, Markup)
            else _Formatter(self)
        )

        def bounded(*args: Any, **kwargs: Any) -> str:
            if is_map:
                args, kwargs = (), _only_map(args, kwargs)
            check_format(form, args, kwargs)
            return str(_made(formatter.vformat(form, args, kwargs)))

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _CHECKED):
            name = __obj.__name__
            check = next(m.get(name) for kind, m in METHODS.items() if isinstance(owner, kind))
            if name == "join" and args and not isinstance(args[0], _AT_HAND):
                args = (list(counted(args[0])), *args[1:])
            if check is not None:
                check(owner, *args, **kwargs)
        return _made(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    """Looks at each field of a form with what its values put into it, a width perhaps."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_field(format_spec)
        return super().format_field(value, format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """The same for a form that escapes its values."""


def _only_map(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The one argument of `format_map`."""
    if len(args) != 1 or kwargs or not isinstance(args[0], dict):
        raise TypeError("format_map takes one dict, and nothing else")
    return args[0]


def bounded(tree: nodes.Template) -> nodes.Template:
    """A parsed template whose `~`, slices and long lists are counted, too."""
    result = _Counted().visit(tree)
    assert isinstance(result, nodes.Template)
    return result


class _Counted(NodeTransformer):
    """Puts filters around what no environment is asked for."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if len(node.items) > _MOST_LITERALS else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_long = node.ctx == "load" and len(node.items) > _MOST_LITERALS
        return _filtered(node, _MADE) if is_long else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if len(node.items) > _MOST_LITERALS else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _made(value: Any) -> Any:
    charge_value(value)
    return value


@pass_context
def _made_again(_: Context, value: Any) -> Any:
    """What is made each time: with a context, so that no constant is made of it beforehand."""
    return _made(value)


@pass_eval_context
def _joined(context: EvalContext, texts: Iterable[Any]) -> Any:
    need_text(*texts)
    return _made(markup_join(texts) if context.autoescape else str_join(texts))


def _written(value: Any) -> Any:
    """Called with each value that is written out: a block collects their texts."""
    if type(value) is not str:
        need_text(value)
    text = value if isinstance(value, str) else str(value)
    charge_value(text)
    return text


def _bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    check, takes_all = FILTERS.get(name), name in _TAKE_ALL
    first = int(hasattr(original, "jinja_pass_arg"))  # behind the context that Jinja gives

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if takes_all and not isinstance(args[first], _AT_HAND) and hasattr(args[first], "__iter__"):
            args = (*args[:first], list(counted(args[first])), *args[first + 1 :])
        if check is not None:
            check(*args[first:], **kwargs)
        value = original(*args, **kwargs)
        charge_value(value)
        return value

    return run
