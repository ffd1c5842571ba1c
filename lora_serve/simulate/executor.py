"""An executor that computes nothing: each step takes as long as the cost model says.

It owns its replica's clock. A step begins when it is submitted and the one before it has ended, and
to collect it is to wait for its end. Every token drawn is the same.
"""

from __future__ import annotations

from collections import deque

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.model_info import ModelInfo
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


class SimulatedExecutor:
    """An `Executor`. costs: seconds of each feature. busy_seconds: spent in steps so far."""

    def __init__(self, costs: StepFeatures, clock: ReplicaClock) -> None:
        self._costs = costs
        self._clock = clock
        self._submitted: deque[tuple[SchedulerOutput, float]] = deque()  # with their ends
        self._free_at = 0.0
        self.busy_seconds = 0.0

    def load(self) -> ModelInfo:
        raise NotImplementedError("a simulation knows its ModelInfo")

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Nothing: the loader's threads take the time."""

    def submit(self, step: SchedulerOutput) -> None:
        seconds = self._costs.dot(step_features(step))
        self.busy_seconds += seconds
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self._submitted.append((step, self._free_at))

    def collect(self) -> ModelRunnerOutput:
        step, end = self._submitted.popleft()
        self._clock.now = max(self._clock.now, end)
        outputs = []
        for chunk in step.requests:
            outputs.append(DRAWN if chunk.asked.samples else NOTHING)
        return ModelRunnerOutput(step.step_id, tuple(outputs))

    def close(self) -> None:
        """Do nothing: nothing was started."""
