"""Finds the tool calls in an answer's text. Each syntax is a `CallReader`; this is what they share.

White space before calls, and after the last, belongs to them; other text is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.chat.markers import MarkerSearch
from lora_serve.chat.parts import Part, PartCollector
from lora_serve.chat.tool_parsers.reader import CallReader, Schemas

WHITE_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls.

    markers: calls follow one of these, wherever it stands.
    opening: calls begin with this character, if the answer does. "" if they have a marker always.
    special_tokens: of the syntax, which some tokenizer has as special tokens.
    in_template: the chat templates of such models hold all texts of one of these lists.
    has_short_ids: the chat templates take ids of nine letters and digits alone.
    """

    name: str
    reader: type[CallReader]
    markers: tuple[str, ...] = ()
    opening: str = ""
    special_tokens: tuple[str, ...] = ()
    in_template: tuple[tuple[str, ...], ...] = ()
    has_short_ids: bool = False

    def is_in(self, template: str) -> bool:
        return any(all(text in template for text in texts) for texts in self.in_template)


class ToolParser:
    """One answer's calls, of tools with these schemas."""

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form = form
        self._schemas = schemas
        self._found = PartCollector()
        self._search = MarkerSearch(form.markers, WHITE_SPACE)
        self._reader: CallReader | None = None
        self._may_open = bool(form.opening)
        self._follows_call = False

    @property
    def is_in_calls(self) -> bool:
        """Whether what comes next is read as calls."""
        return self._reader is not None

    def feed(self, text: str) -> list[Part]:
        while text:
            text = self._read_text(text) if self._reader is None else self._read_calls(text)
        return self._found.take()

    def finish(self) -> list[Part]:
        if self._reader is not None:
            self._reader.finish()
        else:
            held = self._search.flush()
            if not self._follows_call or held.strip(WHITE_SPACE):
                self._found.content(held)
        return self._found.take()

    def _read_text(self, text: str) -> str:
        """Returns what is to be read as calls, or nothing."""
        begun = text.lstrip(WHITE_SPACE)
        if self._may_open and begun:
            self._may_open = False
            if begun[0] == self._form.opening:
                self._search.push(text[: len(text) - len(begun)])
                self._begin_calls(self._search.flush())
                return begun
        step = self._search.push(text)
        if step.shown:
            self._found.content(step.shown)
            self._follows_call = False
        if step.marker is not None:
            self._may_open = False
            self._begin_calls(step.blanks + step.marker)
        return step.rest

    def _begin_calls(self, read: str) -> None:
        self._reader = self._form.reader(self._schemas, self._found, read)

    def _read_calls(self, text: str) -> str:
        """Returns what is left when the calls have ended."""
        assert self._reader is not None, "calls have begun"
        self._reader.feed(text)
        rest = self._reader.rest
        if rest is None:
            return ""
        self._follows_call = self._reader.has_ended_well
        self._reader = None
        return rest
