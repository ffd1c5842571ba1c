"""A structural tag as a grammar in llguidance's notation of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lora_serve.structured_output.backend import refusal
from lora_serve.structured_output.structural_tag import (
    AllOf,
    AnyText,
    ConstString,
    Format,
    JSONSchema,
    OneOf,
    Optional,
    Plus,
    Regex,
    Star,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)

_HEAD = "%llguidance {}\nTEXT: /(.|\\n)*/\n"
_NO_NOTATION = re.compile(r"\\.|/|\n", re.DOTALL)

# The texts of which one follows a format, and belongs to its expression; None where the answer
# ends. Before () stands no free text, for nothing would tell its end.
Ends = Sequence[str] | None


def grammar_of(
    form: Format, special_id: Callable[[str], int | None], settings: dict[str, Any]
) -> str:
    """The whole grammar, not checked yet.

    Args:
        special_id: of a text that is one special token, which no other tokens make up.
        settings: the library's, of each JSON schema.

    Raises:
        InvalidRequestError: a schema that nothing matches, or free text whose end nothing tells.
    """
    writer = _Writer(special_id, settings)
    start = writer.expression(form, None)
    return _HEAD + "".join(f"{rule}\n" for rule in [*writer.rules, f"start: {start}"])


class _Writer:
    """Writes expressions, and the rules that they name."""

    def __init__(self, special_id: Callable[[str], int | None], settings: dict[str, Any]) -> None:
        self.rules: list[str] = []
        self._special_id = special_id
        self._settings = settings

    def expression(self, form: Format, ends: Ends) -> str:
        """The format, and one of its ends."""
        match form:
            case AnyText():
                return self._text_until(ends)
            case TriggeredTags():
                return self._triggered(form, ends)
            case AllOf(elements):
                return self._in_order(elements, ends)
            case OneOf(elements):
                return _either(self.expression(each, ends) for each in elements)
            case Tag():
                return f"{self._literal(form.begin)} {self._body(form, ends)}"
        return f"{self._closed(form)} {self._ended(ends)}"

    def _closed(self, form: Format) -> str:
        """A format that ends where its own expression does."""
        match form:
            case ConstString(value):
                return self._literal(value)
            case JSONSchema(schema):
                return self._json(schema)
            case Regex(pattern):
                return f"/{_NO_NOTATION.sub(_escaped, pattern)}/"
            case Optional(content):
                return f"({self.expression(content, ())})?"
            case Star(content):
                return f"({self.expression(content, ())})*"
            case Plus(content):
                return f"({self.expression(content, ())})+"
            case TagsWithSeparator():
                return self._separated(form)
        raise AssertionError(f"{type(form).__name__} has free text")

    def _in_order(self, elements: Sequence[Format], ends: Ends) -> str:
        if not elements:
            return self._ended(ends)
        *before, last = elements
        return " ".join(
            [*(self.expression(each, ()) for each in before), self.expression(last, ends)]
        )

    def _body(self, tag: Tag, ends: Ends) -> str:
        """What stands behind its begin."""
        if not any(tag.ends):
            return self._rule(self.expression(tag.content, ends))
        if all(tag.ends):
            content, end = self.expression(tag.content, tag.ends), ""
        else:
            content, end = self.expression(tag.content, ()), f"({self._ended(tag.ends)})?"
        return self._rule(f"{content} {end} {self._ended(ends)}")

    def _separated(self, form: TagsWithSeparator) -> str:
        tag = self._rule(
            _either(f"{self._literal(t.begin)} {self._body(t, ())}" for t in form.tags)
        )
        more = "" if form.stop_after_first else f"({self._literal(form.separator)} {tag})*"
        return f"({tag} {more})" if form.at_least_one else f"({tag} {more})?"

    def _triggered(self, form: TriggeredTags, ends: Ends) -> str:
        after = ends if form.stop_after_first else ()
        found, first, heads = list[str](), list[str](), dict[str, str]()
        for tag in form.tags:
            trigger, body = form.trigger_of(tag), self._body(tag, after)
            if trigger not in heads:
                heads[trigger] = self._text_until([trigger])
            found.append(
                f"{heads[trigger]} {self._literal(tag.begin.removeprefix(trigger))} {body}"
            )
            first.append(f"{self._literal(tag.begin)} {body}")
        if form.stop_after_first:
            return _either(first if form.at_least_one else [*found, self._text_until(ends)])
        begun = _either(first) if form.at_least_one else ""
        return f"{begun} {_either(found)}* {self._text_until(ends)}"

    def _text_until(self, ends: Ends) -> str:
        if ends is None:
            return "TEXT"
        if not ends:
            raise refusal(
                "free text must be all that is left of the answer, or of a tag with an end"
            )
        special = [
            f"TEXT {self._literal(end)}" for end in ends if self._special_id(end) is not None
        ]
        texts = [self._literal(end) for end in ends if self._special_id(end) is None]
        if texts:  # as little text as there can be: up to the first of them
            special.append(self._rule(f"TEXT {_either(texts)}", "[lazy]"))
        return _either(special)

    def _rule(self, expression: str, attribute: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {expression}")
        return name

    def _ended(self, ends: Ends) -> str:
        return _either(self._literal(end) for end in ends if end) if ends else ""

    def _literal(self, text: str) -> str:
        if (token_id := self._special_id(text)) is not None:
            return f"<[{token_id}]>"
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _json(self, schema: dict[str, Any] | bool) -> str:
        if schema is False:
            raise refusal("no text matches the schema false")
        given = {} if schema is True else schema
        return "%json " + json.dumps({**given, "x-guidance": self._settings}, ensure_ascii=False)


def _either(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
