"""How many requests may wait. Whoever is above the limits is refused before it is sent anywhere.

The counts are the API process's own, so they are never late: a request waits from the moment it is
accepted to its first output.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from lora_serve.config import LimitsConfig
from lora_serve.errors import InvalidRequestError, LoraServeError, OverloadedError
from lora_serve.messages import EngineRequest

WINDOW = 64  # first outputs over which their rate is taken
MAX_RETRY_SECONDS = 60


class Company:
    """Requests of one body, which come one after the other: all are taken, or none is."""

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        """num_tokens: of their prompts."""
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self.is_taken = False
        self.refusal: LoraServeError | None = None


class AdmissionControl:
    """Refuses what exceeds --max-num-queued-reqs and --max-num-queued-tokens."""

    def __init__(
        self,
        limits: LimitsConfig,
        max_num_seqs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._growing: set[str] = set()
        self._waiting: dict[str, int] = {}  # prompt tokens of those without an output yet
        self._num_waiting_tokens = 0
        self._first_outputs: deque[float] = deque(maxlen=WINDOW)
        self.num_refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    @property
    def num_queued(self) -> int:
        """Requests beyond those that may run at once."""
        return max(0, len(self._growing) - self._max_num_seqs)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait for their first output."""
        return self._num_waiting_tokens

    def admit(self, requests: Sequence[EngineRequest], company: Company | None = None) -> None:
        """Count requests that arrive together.

        Args:
            company: that they belong to, unless they are all of it.

        Raises:
            OverloadedError: the company would exceed a limit; none of it is counted.
            InvalidRequestError: it exceeds one by itself, however often it is retried.
        """
        num_tokens = sum(num_prompt_tokens(request) for request in requests)
        self._take(company or Company(len(requests), num_tokens))
        for request in requests:
            self._growing.add(request.request_id)
            self._waiting[request.request_id] = num_prompt_tokens(request)
        self._num_waiting_tokens += num_tokens

    def note_output(self, request_id: str) -> None:
        """The engine has told something of it, so it does not wait any more."""
        if self._stop_waiting(request_id):
            self._first_outputs.append(self._clock())

    def note_gone(self, request_id: str) -> None:
        """It has ended, or nobody wants it any more."""
        self._growing.discard(request_id)
        self._stop_waiting(request_id)

    def _stop_waiting(self, request_id: str) -> bool:
        num_tokens = self._waiting.pop(request_id, None)
        if num_tokens is None:
            return False
        self._num_waiting_tokens -= num_tokens
        return True

    def _take(self, company: Company) -> None:
        """Decide for the first one of a company, and keep to that for the others."""
        if company.refusal is not None:
            raise company.refusal
        if company.is_taken:
            return
        try:
            self._check_requests(company.num_requests)
            self._check_tokens(company.num_tokens)
        except LoraServeError as error:
            company.refusal = error
            raise
        company.is_taken = True

    def _check_requests(self, num_new: int) -> None:
        limit = self._limits.max_num_queued_reqs
        if limit is None:
            return
        most = self._max_num_seqs + limit
        if num_new > most:
            raise InvalidRequestError(
                f"this asks for {num_new} answers at once, and at most {most} may run or wait "
                "together (--max-num-seqs, --max-num-queued-reqs); send fewer prompts or a lower n"
            )
        if len(self._growing) + num_new > most:
            self.num_refused["max_num_queued_reqs"] += 1
            raise OverloadedError(
                f"requests queued: {self.num_queued}; {num_new} more would exceed the limit of "
                f"{limit} (--max-num-queued-reqs); retry later",
                self._retry_after_seconds(),
            )

    def _check_tokens(self, num_new: int) -> None:
        limit = self._limits.max_num_queued_tokens
        num_queued = self._num_waiting_tokens
        if limit is not None and num_queued and num_queued + num_new > limit:
            self.num_refused["max_num_queued_tokens"] += 1
            raise OverloadedError(
                f"prompt tokens queued: {num_queued}; {num_new} more would exceed the "
                f"limit of {limit} (--max-num-queued-tokens); retry later",
                self._retry_after_seconds(),
            )

    def _retry_after_seconds(self) -> int:
        """When what waits now will have begun, at the rate of late."""
        seconds = self._clock() - self._first_outputs[0] if self._first_outputs else 0.0
        if seconds <= 0.0:
            return 1
        rate = len(self._first_outputs) / seconds
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(len(self._waiting) / rate)))


def num_prompt_tokens(request: EngineRequest) -> int:
    embeds = request.prompt_embeds
    return embeds.num_tokens if embeds is not None else len(request.token_ids)
