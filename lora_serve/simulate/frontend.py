"""The API process and the client of one replica, which share the cores of its machine.

Each is one thread, so requests and tokens wait for each other there as they do for the engine.
"""

from __future__ import annotations

from functools import partial

from lora_serve.simulate.cores import Cores
from lora_serve.simulate.costs import Costs
from lora_serve.simulate.events import Action, EventQueue


class Frontend:
    def __init__(self, costs: Costs, cores: Cores, events: EventQueue) -> None:
        self._processes = costs.processes
        self._way_seconds = costs.request_seconds
        self._events = events
        self._api, self._client = cores.worker(), cores.worker()

    def send(self, num_prompt_tokens: int, on_sent: Action, on_arrived: Action) -> None:
        """Have the client write and send a request, and the API process read it."""
        api, client = self._processes.api, self._processes.client
        self._client.do(client.prompt_token * num_prompt_tokens, on_sent)
        read_seconds = api.begin + api.prompt_token * num_prompt_tokens
        read = partial(self._api.do, read_seconds, on_arrived)
        self._client.do(client.begin, partial(self._on_its_way, read))

    def _on_its_way(self, then: Action) -> None:
        self._events.at(self._events.now + self._way_seconds, then)

    def take_message(self) -> None:
        """Have the API process read what a step gave."""
        self._api.do(self._processes.api.message, _nothing)

    def pass_on(self, num_tokens: int, is_first: bool, on_read: Action) -> None:
        """Have the API process send a request's new tokens, and the client read them."""
        api, client = self._processes.api, self._processes.client
        read_seconds = client.token * num_tokens + client.first * is_first
        read = partial(self._client.do, read_seconds, on_read)
        self._api.do(api.token * num_tokens + api.first * is_first, read)

    def end(self, on_ended: Action) -> None:
        """Have both end a request whose last token has been read."""
        close = partial(self._client.do, self._processes.client.end, on_ended)
        self._api.do(self._processes.api.end, close)


def _nothing() -> None:
    """Do nothing: no part of the simulation waits for it."""
