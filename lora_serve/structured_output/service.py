"""What the engine asks of grammars, and what it is told; `GrammarProcess` is such a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from lora_serve.structured_outputs import NO_GUESS, Guess, MaskedDrafts, StructuredOutput


class MaskReply(msgspec.Struct, frozen=True):
    """What may follow in one answer after `num_tokens` of its tokens.

    bitmask: as of `SampleInput`; None if `is_finished`, where nothing may follow, or `error` says
    why the answer cannot go on. is_fault: that is not the request's fault.
    is_unavailable: no grammar can be followed now; retry later.
    drafts: tokens that come next, since the grammar forces them, or may come next, since they were
        guessed and it permits them; None if there are none, or they are not looked for.
    """

    request_id: str
    num_tokens: int
    bitmask: bytes | None = None
    is_finished: bool = False
    error: str = ""
    is_fault: bool = False
    is_unavailable: bool = False
    drafts: MaskedDrafts | None = None


class NewTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step gave an answer, and a guess of what follows that, of which nothing is certain."""

    request_id: str
    token_ids: tuple[int, ...]
    guess: Guess = NO_GUESS


class GrammarService(Protocol):
    """Never waits but in `take`. Each `open` and each `advance` is answered by one reply."""

    @property
    def num_pending(self) -> int:
        """How many answers are still owed a reply."""

    def open(
        self,
        request_id: str,
        constraint: StructuredOutput,
        *,
        allows_eos: bool = True,
        share: str = "",
    ) -> None:
        """Compile the constraint, if it is a new one, and begin an answer.

        Args:
            allows_eos: let end tokens follow where the grammar may end. Without, an answer is
                finished where nothing else may follow.
            share: at whose cost it is compiled; shares take turns.

        Raises:
            OverloadedError: too many wait for their grammars already.
        """

    def advance(self, new_tokens: Sequence[NewTokens]) -> None:
        """Append tokens, all of which the last masks allowed, to the answers of some requests."""

    def close(self, request_id: str) -> None:
        """Forget an answer, and what is owed to it; there may be none."""

    def take(self, wait_seconds: float = 0.0) -> list[MaskReply]:
        """All replies that have come; waits so long for the first, if any is owed."""

    def shut_down(self) -> None:
        """End threads and processes; nothing is asked for any more."""
