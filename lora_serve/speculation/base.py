"""The door for drafters: what says which tokens a request may draw next.

A draft changes no answer, whatever it is: a step verifies it by drawing the tokens that it would
have drawn anyway. What a drafter knows of one `Origin` it offers to no other, since the time that a
request takes tells whether its drafts were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.identity import AdapterRef, CacheNamespace, Everything


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an answer comes from: the adapter's version, the cache salt and the tenant."""

    namespace: CacheNamespace
    tenant: str = ""


class RequestDrafter(Protocol):
    """Drafts for one request."""

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        """Learn of the request's tokens, at most so many of those that are new.

        token_ids: all, prompt and answer. Returns how many were learned of.
        """
        ...

    def draft(self, most: int) -> Sequence[int]:
        """Guess what follows all tokens, at most so many; none while some were not taken in."""
        ...


class Drafter(Protocol):
    """Makes the drafters of requests, and learns from answers where it can."""

    def begin(self, origin: Origin, num_prompt_tokens: int) -> RequestDrafter: ...

    def learn(self, origin: Origin, answer: Sequence[int]) -> None:
        """Take in an answer that has ended."""
        ...

    def work(self) -> None:
        """Do a part of what is left to be done; called once a step."""
        ...

    def forget(self, lora_name: str | Everything, but: AdapterRef | None = None) -> None:
        """Drop what was learned of the versions of a name but one, or of EVERYTHING."""
        ...
