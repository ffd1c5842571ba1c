"""Decodes an answer while its tokens come, without ever showing a part of a character.

A token costs the decoding of the few before it, however long the answer is. Text that was shown
stays; all of it together is what decoding all tokens at once gives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lora_serve.text.stop_strings import StopStrings
from lora_serve.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_PART = 3  # U+FFFDs that one unfinished character can show as: as many as it has bytes
_MAX_WINDOW = 16
_MIN_WINDOW = 8


class IncrementalDetokenizer:
    """One answer's text. `append` takes its tokens as they come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_special_tokens: Collection[int] = (),
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Begin with no text.

        Args:
            stop: the text is cut at the first of these; no token up to the min_tokens-th ends one.
            shown_special_tokens: are not skipped.
            prompt_token_ids: what the answer continues. SentencePiece drops the space at the start
                of a text, so without a prompt an answer that begins with a space loses it.
        """
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window = TextWindow(
            tokenizer, skipped.difference(shown_special_tokens), prompt_token_ids[-_MIN_WINDOW:]
        )
        self._stops = StopStrings(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        # Up to the one that completed the stop string; None without, or if the answer's end did.
        self.num_tokens_to_stop: int | None = None
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._stops.matched

    def append(self, token_ids: Sequence[int], finished: bool) -> str:
        """The text that these tokens add. With `finished`, all that was held back comes too.

        Tokens behind the one that completes a stop string are not looked at.
        """
        shown = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self._num_tokens += 1
            shown.append(self._push(self._window.push(token_id)))
            if self.stop_string is not None:
                self.num_tokens_to_stop = self._num_tokens
        if finished:
            shown.append(self._push(self._window.flush()))
            shown.append(self._stops.flush())
        return "".join(shown)

    def _push(self, text: str) -> str:
        return self._stops.push(text, is_checked=self._num_tokens > self._min_tokens)


class TextWindow:
    """The last tokens, and how much of their text was shown.

    Decoding the window gives the end of the whole text, because it begins where a character does
    and holds at least the tokens of one earlier piece of text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int] = ()
    ) -> None:
        """skipped: tokens that have no text."""
        self._decode = tokenizer.decode
        self._skipped = skipped
        self._ids = [token_id for token_id in context if token_id not in self._skipped]
        text = self._text()
        self._num_out = len(text.rstrip(_REPLACEMENT))
        # Tokens before this one end with a whole character; the next window begins here.
        self._next = len(self._ids) if self._num_out == len(text) else 0
        self._is_begun = False

    def push(self, token_id: int) -> str:
        """Add tokens; returns the text that is certain now. A part of a character waits."""
        if token_id in self._skipped:
            return ""
        self._is_begun = True
        self._ids.append(token_id)
        text = self._text()
        num_sure = len(text.rstrip(_REPLACEMENT))
        if len(self._ids) > _MAX_WINDOW:  # not a character, but garbage
            num_sure = max(num_sure, len(text) - _MAX_PART)
        new = text[self._num_out : num_sure]
        self._num_out += len(new)
        if new and num_sure == len(text):
            self._begin_at(self._next, num_unsure=0)
            self._next = len(self._ids)
        elif len(self._ids) > _MAX_WINDOW:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """The text that waited, as it is; not what waits of the context alone."""
        if not self._is_begun:
            return ""
        new = self._text()[self._num_out :]
        self._num_out += len(new)
        return new

    def _text(self) -> str:
        return self._decode(self._ids, skip_special_tokens=False)

    def _begin_at(self, start: int, num_unsure: int) -> None:
        self._ids = self._ids[start:]
        self._num_out = len(self._text()) - num_unsure

    def _shorten(self, text: str) -> None:
        """Drop tokens that can no longer change the text, where no character is ever completed.

        A character has at most four bytes, so of four tokens one begins where a character does.
        """
        for start in range(len(self._ids) - _MIN_WINDOW, len(self._ids) - _MIN_WINDOW + 4):
            if text.endswith(self._decode(self._ids[start:], skip_special_tokens=False)):
                self._begin_at(start, num_unsure=len(text) - self._num_out)
                self._next = 0
                return
