"""The answers that are running: admits requests, sends them, and tells their callers what comes.

When an engine dies, requests that have told their callers nothing yet are sent to the next one, as
`quarantine.py` says. Knows nothing of adapters, pauses and other calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from lora_serve.engine.frontend.admission import AdmissionControl, RequestGroup
from lora_serve.engine.frontend.output import OutputProcessor
from lora_serve.engine.frontend.quarantine import Quarantine
from lora_serve.engine.frontend.request_states import RequestState, RequestStates
from lora_serve.engine.frontend.supervisor import EngineSupervisor
from lora_serve.engine_stats import RequestTimes
from lora_serve.errors import EngineDeadError, LoraServeError, RequestFailedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import AbortRequests, EngineOutput, EngineRequest, StepOutputs
from lora_serve.outputs import OutputDelta

logger = logging.getLogger(__name__)


class StoppedAnswer(NamedTuple):
    """An answer that a stop string has ended: how many tokens it has, and when the last came."""

    num_tokens: int
    last_token: float

    def correct(self, times: RequestTimes) -> RequestTimes:
        """The engine knows no stop strings: to it, the answer ended later, for another reason."""
        return replace(
            times,
            finish_reason="stop",
            num_output_tokens=self.num_tokens,
            finished=min(times.finished, self.last_token),
        )


class RunningAnswers:
    """Each begins with `begin`, goes on with `advance` and `tell`, and must end with `end`."""

    def __init__(
        self,
        engine: EngineSupervisor,
        admission: AdmissionControl,
        quarantine: Quarantine,
        outputs: OutputProcessor,
        max_backlog: int,
    ) -> None:
        """max_backlog: how many deltas of a streamed request may wait."""
        self._engine = engine
        self._admission = admission
        self._quarantine = quarantine
        self._outputs = outputs
        self._max_backlog = max_backlog
        self._states = RequestStates()
        self._stopped: dict[str, StoppedAnswer] = {}  # whose times the engine has yet to tell

    @property
    def num_unfinished(self) -> int:
        """Choices that were sent to an engine and have not ended; the quarantine's are not sent."""
        return self._outputs.num_unfinished

    def running(self, is_meant: Callable[[GenerateRequest], bool]) -> list[RequestState]:
        """The requests that are meant and not over, oldest first."""
        return [s for s in self._states if not s.is_over and is_meant(s.message.request)]

    def begin(self, message: EngineRequest, group: RequestGroup | None) -> RequestState:
        """Take in a request; the next `advance` may send it.

        Raises:
            InvalidRequestError, OverloadedError: it is not admitted, nor the rest of its group.
        """
        self._admission.admit(message, group)
        state = RequestState(message, self._max_backlog)
        self._states.add(state)
        self._quarantine.add(state)
        return state

    async def advance(self) -> None:
        """Send the engine the requests that the quarantine lets go by now."""
        if self._quarantine.is_empty:
            return
        with contextlib.suppress(EngineDeadError):  # as `engine_died` will tell
            while (
                self._engine.is_serving and (state := self._quarantine.next_to_send()) is not None
            ):
                state.is_sent = True
                self._outputs.add(state.message)
                await self._engine.send(state.message)

    async def tell(self, output: EngineOutput) -> None:
        """Pass on what a step gave one request, and end what is over."""
        state = self._states.get(output.request_id)
        if state is None or state.is_over:
            return
        self._admission.note_output(output.request_id)
        try:
            delta, must_abort = self._outputs.process(output)
        except Exception:  # a bug: others' answers go on
            logger.exception(
                "an output of %s could not be passed on to its caller", output.request_id
            )
            delta, must_abort = RequestFailedError("this answer cannot be turned into text"), False
        if isinstance(delta, LoraServeError):
            state.fail(delta)
        elif delta is not None:
            if not state.put(delta):
                await self._release(state)
            elif isinstance(delta.stop_reason, str):
                self._note_stopped(output.request_id, state, delta)
            if delta.finish_reason is not None:
                self._admission.note_gone(output.request_id)
        if must_abort:
            await self._abort([output.request_id])

    def with_stop_strings(self, step: StepOutputs) -> StepOutputs:
        """What a step of which all outputs were told gave, with the ends that stop strings made."""
        if not self._stopped:
            return step
        stopped = [self._stopped.pop(times.request_id, None) for times in step.finished]
        for output in step.outputs:
            if output.finish_reason is not None:  # its times come no later
                self._stopped.pop(output.request_id, None)
        pairs = zip(step.finished, stopped, strict=True)
        return replace(step, finished=tuple(end.correct(t) if end else t for t, end in pairs))

    def _note_stopped(self, choice_id: str, state: RequestState, delta: OutputDelta) -> None:
        assert delta.times is not None, f"{choice_id} has ended without its times"
        num_tokens = state.num_tokens(delta.index)
        self._stopped[choice_id] = StoppedAnswer(num_tokens, delta.times.last_token)

    async def end(self, state: RequestState) -> None:
        """Forget a request whose caller has all or is gone; others may be sent in its place."""
        self._states.remove(state)
        await self._release(state)
        await self.advance()

    def end_unsent(self, states: Iterable[RequestState]) -> None:
        """End those of them that no engine has, as aborted."""
        for state in states:
            if not (state.is_sent or state.is_over):
                state.end_unsent()
                for choice_id in state.choice_ids:
                    self._admission.note_gone(choice_id)

    def fail_all(self, error: LoraServeError) -> None:
        self._states.fail_all(error)

    def engine_died(self, error: EngineDeadError) -> None:
        """End the answers that have begun; the others go to the next engine."""
        self._quarantine.engine_died(error, self._states)
        self._stopped.clear()

    async def engine_is_back(self) -> None:
        self._quarantine.engine_is_back()
        await self.advance()

    async def _release(self, state: RequestState) -> None:
        """Forget this request's choices, and abort in the engine those that still grow."""
        growing = []
        for choice_id in state.choice_ids:
            self._admission.note_gone(choice_id)
            if self._outputs.discard(choice_id):
                growing.append(choice_id)
        await self._abort(growing)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self._engine.is_serving:
            await self._engine.send(AbortRequests(tuple(request_ids)))
