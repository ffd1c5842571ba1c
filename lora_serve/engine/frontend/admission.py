"""Bounds how many requests may wait. One above the limits is refused before the engine hears of it.

The counts are the API process's own, so they are never late: a request waits from the moment it is
accepted to its first output.

With fair shares one share may fill as much of the queue as it leaves free, so that a flood of one
never keeps the others out. Source: Choudhury and Hahne 1998, dynamic queue length thresholds for
shared-memory packet switches.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from lora_serve.config import LimitsConfig
from lora_serve.config.limits import UNLIMITED
from lora_serve.engine.fair_share import share_of
from lora_serve.errors import InvalidRequestError, LoraServeError, OverloadedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest
from lora_serve.outputs import OutputDelta

WINDOW = 64  # first outputs over which their rate is taken
MAX_RETRY_SECONDS = 60


class RequestGroup:
    """The requests of one body, which come one after the other: all are admitted, or none is.

    `close` it when no further one will come, so that others get the room of those that never came.
    unread: what requests had come to when their caller left, and did not take, by their ids.
    """

    def __init__(self, num_requests: int, num_tokens: int) -> None:
        """num_tokens: of their prompts."""
        self.num_requests = num_requests  # that have not come yet
        self.num_tokens = num_tokens
        self.refusal: LoraServeError | None = None
        self.admitted_by: AdmissionControl | None = None
        self.share = ""
        self.unread: list[tuple[str, OutputDelta]] = []

    def close(self) -> None:
        if self.admitted_by is not None:
            self.admitted_by.forget(self)


class AdmissionControl:
    """Refuses what exceeds --max-num-queued-reqs and --max-num-queued-tokens."""

    def __init__(
        self,
        limits: LimitsConfig,
        max_num_seqs: int,
        fair_share: str = "none",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._max_num_seqs = max_num_seqs
        self._fair_share = fair_share
        self._clock = clock
        self._growing: set[str] = set()
        self._num_to_come = 0  # of groups that were admitted
        self._waiting: dict[str, GenerateRequest] = {}  # choices without an output yet
        self._num_waiting_tokens = 0
        self._num_of_share: Counter[str] = Counter()  # of those that wait
        self._num_tokens_of_share: Counter[str] = Counter()
        self._first_outputs: deque[float] = deque(maxlen=WINDOW)
        self.num_refused = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}

    @property
    def num_queued(self) -> int:
        """Requests beyond those that may run at once."""
        return max(0, len(self._growing) + self._num_to_come - self._max_num_seqs)

    def admit(self, message: EngineRequest, group: RequestGroup | None = None) -> None:
        """Count a prompt's choices.

        Args:
            group: what they belong to, unless they are all of it.

        Raises:
            OverloadedError: the group would exceed a limit; none of it is counted.
            InvalidRequestError: it exceeds one by itself, however often it is retried.
        """
        request, n = message.request, message.request.params.n
        num_tokens = n * request.prompt.num_tokens
        share = share_of(request, self._fair_share)
        group = group or RequestGroup(n, num_tokens)
        self._admit_group(group, share)
        group.num_requests -= n
        group.num_tokens -= num_tokens
        self._num_to_come -= n
        for choice_id in message.choice_ids:
            self._growing.add(choice_id)
            self._waiting[choice_id] = request

    def forget(self, group: RequestGroup) -> None:
        """What of an admitted group has not come will not come any more."""
        self._num_to_come -= group.num_requests
        self._count(group.share, -group.num_requests, -group.num_tokens)
        group.num_requests = group.num_tokens = 0

    def note_output(self, request_id: str) -> None:
        """Note that a request has got an output, so that it waits no more."""
        if self._stop_waiting(request_id):
            self._first_outputs.append(self._clock())

    def note_gone(self, request_id: str) -> None:
        """Note that a request has ended, or that its caller has left."""
        self._growing.discard(request_id)
        self._stop_waiting(request_id)

    def _stop_waiting(self, request_id: str) -> bool:
        request = self._waiting.pop(request_id, None)
        if request is None:
            return False
        self._count(share_of(request, self._fair_share), -1, -request.prompt.num_tokens)
        return True

    def _count(self, share: str, num_requests: int, num_tokens: int) -> None:
        self._num_waiting_tokens += num_tokens
        self._num_of_share[share] += num_requests
        self._num_tokens_of_share[share] += num_tokens
        if not self._num_of_share[share]:
            del self._num_of_share[share], self._num_tokens_of_share[share]

    def _admit_group(self, group: RequestGroup, share: str) -> None:
        """Admit the whole group with its first request, or refuse all of it."""
        if group.refusal is not None:
            raise group.refusal
        if group.admitted_by is not None:
            return
        try:
            self._check_requests(group.num_requests, share)
            self._check_tokens(group.num_tokens, share)
        except LoraServeError as error:
            group.refusal = error
            raise
        group.admitted_by, group.share = self, share
        self._num_to_come += group.num_requests
        self._count(share, group.num_requests, group.num_tokens)

    def _check_requests(self, num_new: int, share: str) -> None:
        limit = self._limits.max_num_queued_reqs
        if limit == UNLIMITED:
            return
        most = self._max_num_seqs + limit
        if num_new > most:
            raise InvalidRequestError(
                f"this asks for {num_new} answers at once, and at most {most} may run or wait "
                "together (--max-num-seqs, --max-num-queued-reqs); send fewer prompts or a lower n"
            )
        queued = self.num_queued
        num_known = len(self._growing) + self._num_to_come
        num_more = max(0, num_known + num_new - self._max_num_seqs) - queued
        if queued + num_more > limit:
            self._refuse(
                "max_num_queued_reqs",
                f"requests queued: {queued}; {num_new} more would exceed the limit of {limit}",
            )
        num_own = min(queued, self._num_of_share[share])
        if num_more and self._is_too_much(num_own, num_more, limit - queued):
            self._refuse(
                "max_num_queued_reqs",
                f"requests queued for this {self._fair_share}: {num_own}; the {limit - queued} "
                "that may still be queued are kept for others",
            )

    def _check_tokens(self, num_new: int, share: str) -> None:
        limit, queued = self._limits.max_num_queued_tokens, self._num_waiting_tokens
        if limit == UNLIMITED or not queued:
            return
        if queued + num_new > limit:
            self._refuse(
                "max_num_queued_tokens",
                f"prompt tokens queued: {queued}; {num_new} more would exceed the limit of {limit}",
            )
        num_own = self._num_tokens_of_share[share]
        if self._is_too_much(num_own, num_new, limit - queued):
            self._refuse(
                "max_num_queued_tokens",
                f"prompt tokens queued for this {self._fair_share}: {num_own}; the "
                f"{limit - queued} that may still be queued are kept for others",
            )

    def _is_too_much(self, num_own: int, num_more: int, num_free: int) -> bool:
        """Whether a share that has something in the queue would have more than is free."""
        return self._fair_share != "none" and num_own > 0 and num_own + num_more > num_free

    def _refuse(self, name: str, why: str) -> None:
        self.num_refused[name] += 1
        flag = "--" + name.replace("_", "-")
        raise OverloadedError(f"{why} ({flag}); retry later", self._retry_after_seconds())

    def _retry_after_seconds(self) -> int:
        """When what waits now will have begun, at the rate of late."""
        seconds = self._clock() - self._first_outputs[0] if self._first_outputs else 0.0
        if seconds <= 0.0:
            return 1
        rate = len(self._first_outputs) / seconds
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(len(self._waiting) / rate)))
