"""What operators, methods and filters of a chat template may make, estimated before they do.

Each check is of one name, and takes what that takes; it refuses by `need`. What is not named here
makes no more than some times what it is given, which is counted when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from lora_serve.chat.template_memory import (
    CHAR_BYTES,
    ITEM_BYTES,
    charge,
    need,
    need_text,
    written_chars,
)

Check = Callable[..., None]

_MOST_WIDTH = 10_000  # of a field that is filled up
_MOST_INDENT = 16  # of JSON: the deeper, the more often it is written
_MOST_BITS = 2**20  # of a number
_MOST_PLACES = 1_000  # that a number is rounded to
_MOST_DIGITS = 20  # of a width that is read as a number
_URL_CHARS = 4  # the least of a link, with the space behind it
_LINK_CHARS = 64  # that are written for one beside its text
_USUAL_SEPARATOR = 2  # characters of JSON's
# A field as `%` reads it, up to the letter of its kind: a key, flags, a width, a precision.
_FIELD = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\*|[0-9]+)?(?:\.(\*|[0-9]*))?[hlL]?(.?)", re.DOTALL)


def _refuse_above(limit: int, what: str, *numbers: object) -> None:
    for number in numbers:
        if isinstance(number, int) and number > limit:
            raise ValueError(f"{what} is {str(number)[:20]}, above {limit:,}")


# ── operators ───────────────────────────────────────────────────────────────────────────────


def _times(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_above(_MOST_BITS, "bits of a product", left.bit_length() + right.bit_length())
    for many, count in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(count, int):
            need(ITEM_BYTES * len(many) * count if count > 1 else 0)


def _power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_above(_MOST_BITS, "bits of a power", left.bit_length() * right)


def _remainder(left: object, right: object) -> None:
    if isinstance(left, str | bytes):
        _filled(left.decode("latin-1") if isinstance(left, bytes) else left, right)


def _filled(form: str, values: object) -> None:
    """Check the text that `%` makes of a form."""
    fields = _FIELD.findall(form)
    if any(kind == "(" for *_, kind in fields):
        raise ValueError("a key of a form for % has brackets in it, or no end; rename it")
    told = [number for *numbers, _ in fields for number in numbers if number]
    if "*" in told:  # a width is among the values
        values = values if isinstance(values, tuple) else (values,)
        _refuse_above(_MOST_WIDTH, "a width", *values)
    _refuse_above(_MOST_WIDTH, "a width", *(_number(each) for each in told if each != "*"))
    need_text(form, values, times=1 + form.count("%"))


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


OPERATORS: Mapping[str, Check | None] = MappingProxyType(
    {"*": _times, "**": _power, "%": _remainder, "+": None}  # a sum has what both have
)

# ── methods, by what they are bound to ──────────────────────────────────────────────────────


def check_format(form: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Check the text that `form.format(*args, **kwargs)` makes, but for its widths."""
    need_text(form, *args, *kwargs.values(), times=1 + form.count("{"))


def check_field(spec: str) -> None:
    """Check the widths of one field of such a form, with the values that it names put in."""
    _refuse_above(_MOST_WIDTH, "a width", *map(_number, re.findall(r"\d+", spec)))


def _aligned(text: str, width: int = 0, *_: object) -> None:
    need(CHAR_BYTES * width)


def _tabs(text: str, tabsize: int = 8) -> None:
    need(CHAR_BYTES * len(text) * (1 + max(0, tabsize)))


def _replaced(text: str, old: object, new: object, count: int | None = None) -> None:
    times = len(text) // max(1, len(str(old))) + 1
    times = times if count is None or count < 0 else min(times, count)
    need(CHAR_BYTES * (len(text) + times * written_chars(new)))


def _translated(text: str, table: object) -> None:
    longest = max(map(written_chars, table.values()), default=1) if isinstance(table, dict) else 1
    need(CHAR_BYTES * len(text) * max(1, longest))


def _parted(text: str, sep: str | None = None, *_: object, **__: object) -> None:
    count = len(text) // 2 if not sep else text.count(sep)
    need(CHAR_BYTES * len(text) + ITEM_BYTES * (1 + count))


def _lines(text: str, *_: object, **__: object) -> None:
    _parted(text, None)


def _joined(sep: object, items: object) -> None:
    if not isinstance(items, list | tuple | dict | str):
        return  # of a generator: what it gives is counted in `call`
    chars = sum(map(written_chars, items)) if not isinstance(items, str) else len(items)
    need(CHAR_BYTES * (chars + written_chars(sep) * len(items)))


def _bytes_of(number: int, length: int = 1, *_: object, **__: object) -> None:
    need(length)


METHODS: Mapping[type, Mapping[str, Check]] = MappingProxyType(
    {
        str: {
            **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _aligned),
            **dict.fromkeys(("split", "rsplit"), _parted),
            "splitlines": _lines,
            "expandtabs": _tabs,
            "replace": _replaced,
            "translate": _translated,
            "join": _joined,
        },
        bytes: {
            **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _aligned),
            **dict.fromkeys(("split", "rsplit"), _parted),
            "splitlines": _lines,
            "expandtabs": _tabs,
            "replace": lambda text, old, new, count=None: need((len(text) + 1) * (1 + len(new))),
            "join": _joined,
        },
        int: {"to_bytes": _bytes_of},
    }
)

# ── filters, by what they are given first ───────────────────────────────────────────────────


def _as_text(value: object, *_: object, **__: object) -> None:
    if type(value) is not str:
        need_text(value)


def _escaped(value: object, *_: object, **__: object) -> None:
    need_text(value, times=6)


def _linked(
    value: object,
    trim_url_limit: object = None,
    nofollow: object = False,
    target: object = None,
    rel: object = None,
    extra_schemes: object = None,
) -> None:
    _escaped(value)
    each = _LINK_CHARS + 6 * sum(written_chars(text) for text in (target, rel) if text)
    need(CHAR_BYTES * (1 + written_chars(value) // _URL_CHARS) * each)


def _centred(value: object, width: int = 80) -> None:
    need_text(value)
    need(CHAR_BYTES * width)


def _indented(
    value: object, width: int | str = 4, first: bool = False, blank: bool = False
) -> None:
    each = len(width) if isinstance(width, str) else width
    need(CHAR_BYTES * written_chars(value))
    need(CHAR_BYTES * (1 + str(value).count("\n")) * each)


def _wrapped(
    value: object,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> None:
    need_text(value, times=1 + len(wrapstring or "\n"))


def _substituted(value: object, old: object, new: object, count: int | None = None) -> None:
    need_text(value)
    _replaced(str(value), old, new, count)


def _written_json(
    value: object,
    ensure_ascii: bool = False,
    indent: object = None,
    separators: object = None,
    sort_keys: bool = False,
) -> None:
    depth = len(indent) if isinstance(indent, str) else indent
    _refuse_above(_MOST_INDENT, "the indent of JSON", depth)
    if not isinstance(separators, list | tuple | None):
        raise ValueError("the separators of JSON are no list; give (',', ':') or another two texts")
    longer = sum(max(0, written_chars(each) - _USUAL_SEPARATOR) for each in separators or ())
    need_text(value, times=1 + (max(0, depth) if isinstance(depth, int) else 0) + longer)


def _put_in(form: object, *args: object, **kwargs: object) -> None:
    need_text(form)
    _filled(str(form), kwargs or args)


def _joined_filter(value: object, d: object = "", attribute: object = None) -> None:
    _joined(d, value)


def _grouped(value: object, *args: object, **kwargs: object) -> None:
    _as_list(value)
    sizes = (each for each in (*args, *kwargs.values()) if isinstance(each, int))
    need(ITEM_BYTES * max(sizes, default=1))


def _as_list(value: object, *_: object, **__: object) -> None:
    if isinstance(value, str | bytes):
        need(ITEM_BYTES * len(value))


def _rounded(value: object, precision: object = 0, method: object = "common") -> None:
    if isinstance(precision, int):
        _refuse_above(_MOST_PLACES, "places of a rounded number", abs(precision))


def _summed(value: object, attribute: object = None, start: object = 0) -> None:
    if not isinstance(start, list | tuple) or not isinstance(value, list | tuple):
        return
    if attribute is not None:  # each item of a list within counts as ITEM_BYTES there, and more
        need(written_chars(value))
    else:
        need(ITEM_BYTES * sum(len(each) for each in value if isinstance(each, list | tuple)))


FILTERS: Mapping[str, Check] = MappingProxyType(
    {
        **dict.fromkeys(("e", "escape", "forceescape", "xmlattr", "urlencode"), _escaped),
        **dict.fromkeys(("string", "trim", "upper", "lower", "title", "capitalize"), _as_text),
        **dict.fromkeys(("pprint", "truncate", "striptags", "wordcount"), _as_text),
        **dict.fromkeys(("list", "sort", "unique", "groupby", "reverse"), _as_list),
        **dict.fromkeys(("batch", "slice"), _grouped),
        "center": _centred,
        "format": _put_in,
        "indent": _indented,
        "join": _joined_filter,
        "replace": _substituted,
        "round": _rounded,
        "sum": _summed,
        "tojson": _written_json,
        "urlize": _linked,
        "wordwrap": _wrapped,
    }
)


def counted(items: Iterable[object]) -> Iterable[object]:
    """The items of a generator, each of which is counted when it is taken."""
    for item in items:
        charge(ITEM_BYTES)
        need_text(item)
        charge(CHAR_BYTES * written_chars(item))
        yield item
