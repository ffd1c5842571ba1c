"""Times between the tokens of running requests, as they leave the engine.

Remembers one time for each running request. The end of an aborted request is not reported, so those
that were silent for the longest are forgotten beyond a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from lora_serve.messages import EngineOutput

MAX_REQUESTS = 16_384


class TokenIntervals:
    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._last_token: OrderedDict[str, float] = OrderedDict()  # longest silent first

    def observe(self, outputs: Iterable[EngineOutput], now: float) -> Iterator[float]:
        """Seconds since each request's last token, for those that had one."""
        for output in outputs:
            last = self._last_token.pop(output.request_id, None)
            if last is not None and output.new_token_ids:
                yield now - last
            if output.finish_reason is None and output.error is None:
                self._last_token[output.request_id] = now
        while len(self._last_token) > self._max_requests:
            self._last_token.popitem(last=False)
