"""An executor that computes nothing: each step takes as long as the cost model says.

A step begins when it was submitted and the one before it has ended. What else uses the machine's
cores meanwhile may have it take longer: the replica goes on when `collected` has ended. Every token
drawn is the same.
"""

from __future__ import annotations

from collections import deque

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.model_info import ModelInfo
from lora_serve.simulate.cores import Worker
from lora_serve.simulate.deviations import Deviations
from lora_serve.simulate.events import Action
from lora_serve.simulate.features import StepFeatures, step_features
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, SchedulerOutput

DRAWN = RequestStepOutput((1,))
NOTHING = RequestStepOutput()


class ReplicaClock:
    """One replica's time: that of its turn's begin, then that at which what it waited for ended."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SubmittedStep:
    """likely_end: when it ends if nothing else takes the cores."""

    def __init__(self, step: SchedulerOutput, likely_end: float) -> None:
        self.step = step
        self.likely_end = likely_end
        self._has_ended = False
        self._then: Action | None = None

    def end(self) -> None:
        self._has_ended = True
        if self._then is not None:
            self._then()

    def when_ended(self, then: Action) -> bool:
        """Have `then` called at its end; False if it has ended already."""
        self._then = then
        return not self._has_ended


class SimulatedExecutor:
    """An `Executor`. costs: seconds of each feature. engine: whose time the steps take.

    collected: the step that was collected last.
    """

    def __init__(
        self, costs: StepFeatures, deviations: Deviations, clock: ReplicaClock, engine: Worker
    ) -> None:
        self._costs = costs
        self._deviations = deviations
        self._clock = clock
        self._engine = engine
        self._submitted: deque[SubmittedStep] = deque()
        self._free_at = 0.0
        self.collected: SubmittedStep | None = None

    @property
    def busy_seconds(self) -> float:
        """Spent in steps so far."""
        return self._engine.busy_seconds

    def load(self) -> ModelInfo:
        raise NotImplementedError("a simulation knows its ModelInfo")

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Nothing: the loader's threads take the time."""

    def submit(self, step: SchedulerOutput) -> None:
        features = step_features(step)
        seconds = self._costs.dot(features) * self._deviations.draw(features.kind)
        self._free_at = max(self._free_at, self._clock.now) + seconds
        submitted = SubmittedStep(step, self._free_at)
        self._submitted.append(submitted)
        self._engine.do(seconds, submitted.end)

    def collect(self) -> ModelRunnerOutput:
        self.collected = submitted = self._submitted.popleft()
        step = submitted.step
        self._clock.now = max(self._clock.now, submitted.likely_end)
        outputs = []
        for chunk in step.requests:
            outputs.append(DRAWN if chunk.asked.samples else NOTHING)
        return ModelRunnerOutput(step.step_id, tuple(outputs))

    def close(self) -> None:
        """Do nothing: nothing was started."""
