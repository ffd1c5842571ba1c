"""Finds the reasoning in an answer's text: what stands between two markers at its beginning.

Newlines next to a marker belong to it; the chat templates write them when the reasoning comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.chat.markers import MarkerSearch
from lora_serve.chat.parts import Content, Part, Reasoning
from lora_serve.structured_outputs import ReasoningTokens

NEWLINES = "\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks reasoning.

    special_tokens: markers that some tokenizer has as special tokens.
    in_template: the chat templates of such models hold this text.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    special_tokens: tuple[str, ...] = ()
    in_template: str | None = None

    def is_in(self, template: str) -> bool:
        return self.in_template is not None and self.in_template in template

    def is_open_in(self, prompt: str) -> bool:
        """Whether a prompt ends with a marker, so that the answer begins within reasoning."""
        return prompt.rstrip().endswith(self.begins)

    def tokens(self, encode: Callable[[str], Sequence[int]], prompt: str) -> ReasoningTokens | None:
        """What marks the reasoning that a grammar waits for, behind a prompt that ends so.

        None if a marker is not one token: a text may be made of other tokens than expected.
        encode: text to token ids, without special tokens around it.
        """
        start, end = encode(self.begins[0]), encode(self.ends[0])
        if len(start) != 1 or len(end) != 1:
            return None
        return ReasoningTokens(start[0], end[0], self.is_open_in(prompt))


class ReasoningParser:
    """One answer's reasoning.

    is_open: what comes is reasoning.
    has_begun: it is known whether the answer begins with a marker.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """is_open: the prompt has begun the reasoning."""
        self._form = form
        self.is_open = is_open
        self.has_begun = False
        self._blanks: list[str] = []  # until then, the answer: white space, in pieces,
        self._begun = ""  # and what may be the beginning of a marker
        self._search = MarkerSearch(form.ends, NEWLINES)
        self._after_marker = is_open  # newlines that come now belong to it

    def feed(self, text: str) -> list[Part]:
        if not self.has_begun:
            text = self._read_head(text)
        parts: list[Part] = []
        if self.is_open and text:
            step = self._search.push(self._without_first_newlines(text))
            if step.shown:
                parts.append(Reasoning(step.shown))
            if step.marker is None:
                return parts
            self.is_open, self._after_marker = False, True
            text = step.rest
        text = self._without_first_newlines(text)
        if text and self.has_begun:
            parts.append(Content(text))
        return parts

    def finish(self) -> list[Part]:
        held = self._search.flush() if self.has_begun else "".join(self._blanks) + self._begun
        if not held:
            return []
        return [Reasoning(held) if self.is_open else Content(held)]

    def _read_head(self, text: str) -> str:
        """Hold text back while it may be a marker; returns what follows that, or all."""
        if not text.strip() and not self._begun:
            self._blanks.append(text)
            return ""
        if not self._begun:
            self._blanks.append(text[: len(text) - len(text.lstrip())])
            text = text.lstrip()
        self._begun += text
        marker = next((m for m in self._form.begins if self._begun.startswith(m)), None)
        if marker is None and any(m.startswith(self._begun) for m in self._form.begins):
            return ""
        self.has_begun = True
        if marker is None:
            return "".join(self._blanks) + self._begun
        self.is_open = self._after_marker = True
        return self._begun[len(marker) :]

    def _without_first_newlines(self, text: str) -> str:
        if self._after_marker:
            text = text.lstrip(NEWLINES)
            self._after_marker = not text
        return text
