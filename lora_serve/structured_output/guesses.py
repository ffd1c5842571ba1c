"""How far a grammar permits a guess of what an answer says next, and what may follow each token.

It works on a copy of the answer's matcher, so that a wrong guess, or one that the library fails at,
leaves the answer as it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lora_serve.bitmask import allows
from lora_serve.errors import InvalidRequestError
from lora_serve.step import num_same
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.backend import Matcher
from lora_serve.structured_output.outlook import Outlooks
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import Guess, MaskedDrafts

_FIRST_REST = 4  # guesses


class FollowedGuess:
    """One answer's guess, followed token by token; forced tokens are part of it, and go beyond it.

    reply: what may follow the answer as it is, with as many drafts as were found so far.
    """

    def __init__(
        self,
        reply: MaskReply,
        guess: Guess,
        matcher: Matcher,
        outlooks: Outlooks,
        *,
        allows_eos: bool,
        max_drafts: int,
    ) -> None:
        """reply: with the tokens that are forced, all of which the matcher has.

        max_drafts: with those.
        """
        self.reply = reply
        drafts = reply.drafts
        self._token_ids = [] if drafts is None else [*drafts.token_ids]
        self._bitmasks = [] if drafts is None else [*drafts.bitmasks]
        self._begins_forced = drafts is not None
        is_right = num_same(guess.token_ids, self._token_ids) == len(self._token_ids)
        self._guess = guess.token_ids if is_right else ()
        self._num_left = guess.most
        self._matcher = matcher
        self._outlooks = outlooks
        self._allows_eos = allows_eos
        self._max_drafts = max_drafts

    def go_on(self) -> bool:
        """Follow one more token; False if there is none to follow."""
        place = len(self._token_ids)
        if place >= self._max_drafts:
            return False
        mask = self._bitmasks[-1] if place else self.reply.bitmask
        assert mask is not None, "an answer that is complete is guessed for"
        token_id = self._next_token(place, mask)
        if token_id is None:
            return False
        try:
            self._matcher.accept(token_id)
            behind = self._outlooks.behind(self._matcher, allows_eos=self._allows_eos)
        except InvalidRequestError:
            return False  # the answer may never come there
        if behind is None:
            return False  # no row can draw what follows it
        if place and self._outlooks.forced(mask) is not None:
            self._bitmasks[-1] = b""
        self._token_ids.append(token_id)
        self._bitmasks.append(behind)
        return True

    def followed(self) -> MaskReply:
        """The reply with all drafts that were found."""
        if not self._token_ids:
            return self.reply
        drafts = MaskedDrafts(tuple(self._token_ids), tuple(self._bitmasks), self._begins_forced)
        return msgspec.structs.replace(self.reply, drafts=drafts)

    def _next_token(self, place: int, mask: bytes) -> int | None:
        """The token that is forced there, or else guessed and permitted."""
        forced = self._outlooks.forced(mask)
        guessed = self._guess[place] if place < len(self._guess) else None
        if forced is not None:
            if guessed != forced:
                self._guess = ()
            return forced
        if guessed is None or not self._num_left or not allows(mask, guessed):
            return None
        self._num_left -= 1
        return None if self._outlooks.ends(guessed) else guessed


@dataclass(slots=True)
class _Rest:
    """How many of an answer's guesses are not followed, since a token took all the time."""

    num_left: int = 0
    num_next: int = _FIRST_REST

    def begin(self) -> None:
        """Each one is twice as long: a grammar's first masks take longer than others."""
        self.num_left = self.num_next
        self.num_next *= 2


class GuessQueue:
    """Guesses that are followed in turn, a token each, while nothing else is asked for.

    at_work: whose guess is followed is noted there.
    """

    def __init__(self, at_work: AtWork) -> None:
        self._at_work = at_work
        self._waiting: deque[FollowedGuess] = deque()
        self._since = 0.0
        self._rests: dict[str, _Rest] = {}  # of answers that had slow tokens

    def __bool__(self) -> bool:
        """Whether replies wait here."""
        return bool(self._waiting)

    @property
    def waited_seconds(self) -> float:
        """How long the first of them has waited; 0 without any."""
        return time.monotonic() - self._since if self._waiting else 0.0

    def put(self, guess: FollowedGuess) -> bool:
        """Have a guess followed, which then replies; False if it is not to be."""
        rest = self._rests.get(guess.reply.request_id)
        if rest is not None and rest.num_left > 0:
            rest.num_left -= 1
            return False
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(guess)
        return True

    def follow(self, may_go_on: Callable[[], bool], seconds: float) -> list[MaskReply]:
        """Follow all while they may go on, at most so long; returns the replies of all."""
        replies = []
        deadline = time.monotonic() + seconds
        while self._waiting and may_go_on() and time.monotonic() < deadline:
            guess = self._waiting.popleft()
            if self._go_on(guess, seconds):
                self._waiting.append(guess)
            else:
                replies.append(guess.followed())
        return replies + self.take()

    def take(self) -> list[MaskReply]:
        """The replies of all, as far as they have come."""
        replies = [guess.followed() for guess in self._waiting]
        self._waiting.clear()
        return replies

    def close(self, request_id: str) -> None:
        """Forget an answer, and the guess that waits for it."""
        self._rests.pop(request_id, None)
        kept = (guess for guess in self._waiting if guess.reply.request_id != request_id)
        self._waiting = deque(kept)

    def _go_on(self, guess: FollowedGuess, seconds: float) -> bool:
        """Follow one token. Behind one that takes all the time no more of the answer is guessed."""
        request_id, start = guess.reply.request_id, time.thread_time()
        self._at_work.note(request_id)
        goes_on = guess.go_on()
        self._at_work.note("")
        if time.thread_time() - start > seconds:
            self._rests.setdefault(request_id, _Rest()).begin()
            return False
        return goes_on
