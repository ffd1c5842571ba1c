"""Random pauses of an oracle's engine, and what must hold while it is paused."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.messages import CallReply, EndRequests, Pause, Resume

MODES = ("keep", "keep", "wait", "wait", "abort")
FIRST_CALL = 2 * 10**7  # call ids beside those of other calls


class RandomPauses:
    """Makes pauses, one at a time, in some traces; the others stay as dense as they are."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._probability = rng.choice((0.0, 0.0, 0.08))
        self._num_calls = 0
        self._pause: Pause | None = None
        self._begun: frozenset[str] = frozenset()  # that must end before a "wait" is answered
        self._num_computed: int | None = None  # tokens when the pause was answered
        self.num_pauses = 0

    def operate(self, engine: OracleEngine) -> Collection[str]:
        """Maybe pause, resume, or end requests; returns the requests that were ended."""
        if self._pause is not None:
            self._check(engine)
            if self._rng.random() < 0.3:
                self.resume(engine)
            return ()
        if self._rng.random() >= self._probability:
            return ()
        if self._rng.random() < 0.3:
            return self._end_some(engine)
        return self._begin(engine)

    def resume(self, engine: OracleEngine) -> None:
        """End the pause, if there is one."""
        if self._pause is None:
            return
        self._check(engine)
        was_answered = self._reply(engine) is not None
        engine.handle(Resume(self._next_call_id()))
        reply = self._reply(engine)
        assert reply is not None, "a pause was not answered when it ended"
        assert was_answered == (reply.error is None), "a pause that was cut short was confirmed"
        self.forget()

    def forget(self) -> None:
        """The engine is gone, and its pause with it."""
        self._pause = self._num_computed = None

    def _begin(self, engine: OracleEngine) -> Collection[str]:
        mode = self._rng.choice(MODES)
        scheduler = engine.core.scheduler
        ids = scheduler.request_ids
        requests = [scheduler.get(request_id) for request_id in ids]
        self._begun = frozenset(r.request_id for r in requests if r is not None and r.has_begun)
        self._pause = Pause(self._next_call_id(), mode)  # type: ignore[arg-type]
        self.num_pauses += 1
        engine.handle(self._pause)
        if mode != "abort":
            return ()
        _check_ended(engine, ids)
        return ids

    def _end_some(self, engine: OracleEngine) -> Collection[str]:
        ids = [name for name in engine.core.scheduler.request_ids if self._rng.random() < 0.5]
        engine.handle(EndRequests(self._next_call_id(), tuple(ids)))
        _check_ended(engine, ids)
        return ids

    def _check(self, engine: OracleEngine) -> None:
        """Assert what must hold once a pause was answered."""
        reply = self._reply(engine)
        if reply is None:
            return
        assert self._pause is not None
        assert reply.error is None, reply.error
        num_computed = engine.executor.num_computed_tokens
        if self._num_computed is None:
            self._num_computed = num_computed
        assert num_computed == self._num_computed, "tokens were computed while it was paused"
        if self._pause.mode == "wait":
            left = self._begun & set(engine.core.scheduler.request_ids)
            assert not left, f"answered while {sorted(left)} had not ended"

    def _reply(self, engine: OracleEngine) -> CallReply | None:
        return engine.calls.get(self._pause.call_id) if self._pause is not None else None

    def _next_call_id(self) -> int:
        self._num_calls += 1
        return FIRST_CALL + self._num_calls


def _check_ended(engine: OracleEngine, request_ids: Collection[str]) -> None:
    for name in request_ids:
        assert engine.last(name).finish_reason == "abort", f"{name} was not told of its end"
        assert engine.core.scheduler.get(name) is None, f"{name} is here after its end"
