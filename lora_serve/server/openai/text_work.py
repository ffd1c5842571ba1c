"""How much text is read, rendered and tokenized at once, in which threads, and whose turn it is.

Texts of one kind share a room by API key: the key that holds least goes first. Short and long texts
are apart, so that no short one stands in a queue behind long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lora_serve.server.http.room import WAIT_SECONDS, Room
from lora_serve.server.http.shares import Holding, Shares
from lora_serve.server.http.threads import run_to_end

MAX_LONG_CHARS_AT_ONCE = 2**22  # tokenizing takes up to 200 bytes a character
SMALL_TEXT_CHARS = 2**16
THREADS = 4  # for short texts, and as many for long ones
# As many as the threads work on: what stands before another key's text is soon done.
MAX_SHORT_CHARS_AT_ONCE = THREADS * SMALL_TEXT_CHARS
TOKEN_CHARS = 4  # that a token counts as where its text is not known yet
# Tokenized in 0.3 to 0.5 ms, 1.7 of emoji, by vocabularies of 768 to 152,000 (Xeon, 2 busy cores).
MAX_CHARS_ON_LOOP = 2**10
LEAST_CHARS = 2**10  # that a text counts as: to hand it to a thread takes time, too
SHORT_WAIT_SECONDS = 60.0  # they may wait: what memory they take, their bodies bound already

Result = TypeVar("Result")


class TextWork:
    """All work on texts of requests."""

    def __init__(self, max_long_chars_at_once: int = MAX_LONG_CHARS_AT_ONCE) -> None:
        self._short = _Kind("short-texts", MAX_SHORT_CHARS_AT_ONCE, SHORT_WAIT_SECONDS)
        self._long = _Kind("long-texts", max_long_chars_at_once, WAIT_SECONDS)

    async def run(self, share: str, num_chars: int, call: Callable[[], Result]) -> Result:
        """What `call` makes of a text of so many characters, in a thread.

        Embeddings in base64 and the ids of /detokenize count as texts, too.

        Raises:
            OverloadedError: others' texts take too long.
        """
        kind = self._short if num_chars <= SMALL_TEXT_CHARS else self._long
        return await kind.run(share, num_chars, call)

    async def tokenize(self, share: str, num_chars: int, call: Callable[[], Result]) -> Result:
        """Do as `run` does, but make few characters, which bound the call's time, at once.

        A thread, and what waits for it, come to their turns late where the loop sends others'
        tokens all the time.
        """
        if num_chars <= MAX_CHARS_ON_LOOP:
            return call()
        return await self.run(share, num_chars, call)


class _Kind:
    """The short texts, or the long ones."""

    def __init__(self, name: str, max_chars_at_once: int, wait_seconds: float) -> None:
        self._threads = ThreadPoolExecutor(THREADS, name)
        self._room = Room(
            Shares(Holding),
            max_chars_at_once,
            what="characters of text",
            work="worked on at once",
            wait_seconds=wait_seconds,
        )

    async def run(self, share: str, num_chars: int, call: Callable[[], Result]) -> Result:
        with self._room.hold(share) as holding:
            await self._room.add_in_turn(holding, max(num_chars, LEAST_CHARS))
            return await run_to_end(self._threads, call)
