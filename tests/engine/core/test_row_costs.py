from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from lora_serve.engine.core.row_costs import measured_row_costs
from lora_serve.fuzz.oracle.draft_model import oracle_draft_model
from lora_serve.fuzz.oracle.executor import OracleExecutor, oracle_model
from lora_serve.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 4
MODEL = oracle_model(8, BLOCK_SIZE)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SlowExecutor(OracleExecutor):
    """Each step takes a second and row_seconds for each row, twice that for one that is drawn.

    The first of a size and kind takes ten times that.
    """

    row_seconds: float
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        super().__init__(BLOCK_SIZE)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        is_first = all(
            (other.num_tokens, is_drawn(other)) != (step.num_tokens, is_drawn(step))
            for other in self.steps
        )
        num_guesses = sum(request.num_next_drafts for request in step.requests)
        row_seconds = self.row_seconds * (1 + is_drawn(step))
        seconds = 1.0 + row_seconds * step.num_tokens + 0.5 * num_guesses
        self.clock.now += (10 if is_first else 1) * seconds / 1000
        return super().execute(step)


def is_drawn(step: SchedulerOutput) -> bool:
    (request,) = step.requests
    return not all(sample.params.is_greedy for sample in request.asked.samples)


@pytest.mark.parametrize(("most_rows", "sizes"), [(16, [1, 2, 4, 8, 16]), (6, [1, 2, 4, 6])])
def test_steps_of_doubled_rows_are_timed_once_they_are_recorded(
    most_rows: int, sizes: list[int]
) -> None:
    executor = SlowExecutor(0.25)
    costs = measured_row_costs(executor, MODEL, BLOCK_SIZE, most_rows, executor.clock)
    assert costs is not None
    assert [(step.num_tokens, is_drawn(step)) for step in executor.steps] == [
        (size, drawn) for size in sizes for drawn in (False, True) for _ in range(3)
    ]
    assert [costs.seconds(n) for n in (1, 2, 3, 12)] == pytest.approx(
        [0.00125, 0.0015, 0.00175, 0.004]
    )
    assert [costs.seconds(n, is_drawn=True) for n in (1, 2, 3, 12)] == pytest.approx(
        [0.0015, 0.002, 0.0025, 0.007]
    )


def test_a_large_model_is_measured_up_to_fewer_rows() -> None:
    executor = SlowExecutor(100.0)
    costs = measured_row_costs(executor, MODEL, BLOCK_SIZE, 16, executor.clock)
    assert costs is not None
    assert max(step.num_tokens for step in executor.steps) == 2
    assert costs.seconds(16) == pytest.approx(1.601)


def test_a_draft_model_is_measured_too() -> None:
    executor = SlowExecutor(0.25)
    model = replace(MODEL, draft_model=oracle_draft_model(4, BLOCK_SIZE))
    costs = measured_row_costs(executor, model, BLOCK_SIZE, 4, executor.clock)
    assert costs is not None
    assert costs.draft_seconds(1) == pytest.approx(0.0005)
    # Of two requests at once each guess takes half of what two rows take.
    assert costs.draft_seconds(2) == pytest.approx(0.0005 * 1.5 / 1.25 / 2)
    free = [0.9, 0.8]  # tokens that the rows may be expected to add
    assert costs.num_worth(1, 1, free) == 2
    assert costs.num_worth(1, 1, free, draft_seconds=10.0) == 0


def test_one_row_alone_tells_nothing_of_others() -> None:
    executor = SlowExecutor(1.0)
    assert measured_row_costs(executor, MODEL, BLOCK_SIZE, 1, executor.clock) is None
