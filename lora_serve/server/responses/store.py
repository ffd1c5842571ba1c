"""Responses that clients may ask for again, or continue: bounded in number, bytes and time.

Each API key has its own; another's are not found. Room is made by the oldest of the key that has
most, of responses where their number is short and of bytes where bytes are, so one key alone cannot
push out those of others. What alone is larger than the bound is not kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.errors import InvalidRequestError, NotFoundError, OverloadedError
from lora_serve.server.responses.items import Item

MAX_RUNNING = 64  # in the background, of one API key


@dataclass(slots=True)
class StoredResponse:
    """One response. `Responses` alone changes it.

    body: the response as JSON. input_items: the conversation that it answers. output_items: what it
    adds to it.
    task: answers it in the background; None for one that was answered while its client waited.
    """

    status: str
    body: bytes
    input_items: Sequence[Item]
    output_items: Sequence[Item]
    expires: float
    num_bytes: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")


_Kept = OrderedDict[str, StoredResponse]  # by id, the oldest first


class StoredResponses:
    """The responses of all API keys."""

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._tenants: dict[str, _Kept] = {}
        self._num_responses = 0
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    @property
    def num_running(self) -> int:
        """How many are being answered in the background."""
        return sum(each.is_running for kept in self._tenants.values() for each in kept.values())

    def require_on(self, field: str) -> None:
        """Raise InvalidRequestError for a body's field that needs stored responses."""
        if not self.is_on:
            raise InvalidRequestError(
                f"{field} needs stored responses, and this server keeps none "
                "(--max-stored-responses 0); send the whole conversation as input",
                field,
            )

    def get(self, tenant: str, response_id: str, field: str = "response_id") -> StoredResponse:
        """Find a response of this tenant's. field: what the request names it by.

        Raises:
            NotFoundError: there is none, or none any more.
        """
        stored = self._find(tenant, response_id)
        if stored is not None and not stored.is_running and stored.expires <= self._clock():
            self._remove(tenant, response_id)
            stored = None
        if stored is None:
            raise NotFoundError(
                f"Response with id '{response_id[:80]}' not found. It may have made room for "
                "others, or be of another API key.",
                field,
            )
        return stored

    def put(
        self,
        tenant: str,
        response_id: str,
        status: str,
        body: bytes,
        input_items: Sequence[Item],
        output_items: Sequence[Item] = (),
    ) -> StoredResponse:
        """Keep a response, as long as there is room, in the place of one that has its id.

        Raises:
            InvalidRequestError: it is to run in the background, and is too large to be kept.
            OverloadedError: it is to run in the background, and too many do.
        """
        expires = self._clock() + self._seconds
        stored = StoredResponse(status, body, input_items, output_items, expires)
        same = self._find(tenant, response_id)
        if same is not None and same.is_running:
            return stored
        num_bytes = _num_bytes(stored)
        if stored.is_running:
            self._check_running(tenant)
            self._check_running_bytes(tenant, num_bytes)
        if same is not None:
            self._remove(tenant, response_id)
        if num_bytes <= self._max_bytes:
            self._tenants.setdefault(tenant, OrderedDict())[response_id] = stored
            self._num_responses += 1
            self._weigh(stored)
            self._make_room()
        return stored

    def check_id(self, tenant: str, response_id: str) -> None:
        """Raise InvalidRequestError for the id of a response that still runs."""
        same = self._find(tenant, response_id)
        if same is not None and same.is_running:
            raise InvalidRequestError(
                f"request_id: response '{response_id[:80]}' still runs in the background; choose "
                "another id, or cancel it",
                "request_id",
            )

    def update(
        self,
        tenant: str,
        response_id: str,
        status: str,
        body: bytes,
        output_items: Sequence[Item] = (),
    ) -> None:
        """Note what has become of a response, unless it was deleted meanwhile."""
        stored = self._find(tenant, response_id)
        if stored is None:
            return
        stored.status, stored.body, stored.output_items = status, body, output_items
        stored.expires = self._clock() + self._seconds
        self._weigh(stored)
        if not stored.is_running and stored.num_bytes > self._max_bytes:
            self._remove(tenant, response_id)
        self._make_room()

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; one that still runs is ended.

        Raises:
            NotFoundError: there is none.
        """
        task = self.get(tenant, response_id).task
        self._remove(tenant, response_id)
        if task is not None:
            task.cancel()

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        kept = self._tenants.get(tenant)
        return None if kept is None else kept.get(response_id)

    def _check_running(self, tenant: str) -> None:
        num_running = {
            name: sum(each.is_running for each in kept.values())
            for name, kept in self._tenants.items()
        }
        if num_running.get(tenant, 0) >= MAX_RUNNING:
            raise OverloadedError(
                f"{MAX_RUNNING} responses of this API key run in the background, which is the "
                "most; wait for one, or cancel it"
            )
        if sum(num_running.values()) >= self._max_responses:
            raise OverloadedError(
                f"--max-stored-responses {self._max_responses} run in the background; retry later"
            )

    def _check_running_bytes(self, tenant: str, num_bytes: int) -> None:
        """Refuse what could only be kept at the cost of keys that have less."""
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"background: the conversation has {num_bytes} bytes, at most "
                f"--max-stored-response-bytes {self._max_bytes} can be kept; ask without "
                "background, or continue a shorter one",
                "background",
            )
        own = self._tenants.get(tenant, OrderedDict()).values()
        num_running = num_bytes + sum(each.num_bytes for each in own if each.is_running)
        others = [_total(kept) for name, kept in self._tenants.items() if name != tenant]
        if num_running + sum(others) > self._max_bytes and num_running > max(others, default=0):
            raise OverloadedError(
                f"responses of this API key that run in the background would take {num_running} "
                f"bytes, more than is left of --max-stored-response-bytes {self._max_bytes}; wait "
                "for one, or cancel it"
            )

    def _weigh(self, stored: StoredResponse) -> None:
        self._num_bytes -= stored.num_bytes
        stored.num_bytes = _num_bytes(stored)
        self._num_bytes += stored.num_bytes

    def _make_room(self) -> None:
        while self._num_responses > self._max_responses or self._num_bytes > self._max_bytes:
            is_short_of_bytes = self._num_bytes > self._max_bytes
            size: Callable[[_Kept], int] = _total if is_short_of_bytes else len
            places = [
                (size(kept), tenant, next((k for k, v in kept.items() if not v.is_running), None))
                for tenant, kept in self._tenants.items()
            ]
            full = max((place for place in places if place[2] is not None), default=None)
            if full is None:
                return
            _, tenant, oldest = full
            assert oldest is not None, "those without one are left out"
            self._remove(tenant, oldest)

    def _remove(self, tenant: str, response_id: str) -> None:
        kept = self._tenants[tenant]
        self._num_bytes -= kept.pop(response_id).num_bytes
        self._num_responses -= 1
        if not kept:
            del self._tenants[tenant]


def _num_bytes(stored: StoredResponse) -> int:
    items = (*stored.input_items, *stored.output_items)
    return len(stored.body) + sum(item.num_bytes for item in items)


def _total(kept: _Kept) -> int:
    return sum(each.num_bytes for each in kept.values())
