from __future__ import annotations

import numpy as np
import pytest

from lora_serve.identity import BASE_MODEL, AdapterRef
from lora_serve.sampling_params import SamplingParams
from lora_serve.simulate.features import StepFeatures, step_features
from lora_serve.simulate.fit import (
    NUM_RATIOS,
    StepSample,
    errors_by_kind,
    fit_by_simulation,
    fit_steps,
    least_squares,
    step_ratios,
)
from lora_serve.step import AskedOutputs, SampleInput, ScheduledRequest, SchedulerOutput

TRUE = StepFeatures(steps=2e-3, decode_tokens=3e-4, prefill_tokens=5e-5, prefill_context=1e-8)


def samples(noise: float, seed: int = 0) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    found = []
    for size in (1, 2, 4, 8, 16):
        for tokens in (0, 32, 128, 700):
            for _ in range(9):
                features = StepFeatures(
                    steps=1,
                    decode_tokens=size,
                    prefill_tokens=tokens,
                    prefill_context=tokens * (tokens + 1) / 2,
                )
                seconds = TRUE.dot(features) * (1 + noise * rng.standard_normal())
                found.append(StepSample(f"{size} {tokens}", features, seconds))
    return found


def test_the_seconds_of_each_feature_are_found_again() -> None:
    found = fit_steps(samples(noise=0.0))
    assert found.values == pytest.approx(TRUE.values, rel=1e-6)


def test_noise_and_steps_that_were_held_up_move_them_little() -> None:
    noisy = samples(noise=0.05)
    held_up = [
        StepSample(one.group, one.features, one.seconds * (20 if number % 9 == 0 else 1))
        for number, one in enumerate(noisy)
    ]
    found = fit_steps(held_up)
    for one in noisy:
        assert found.dot(one.features) == pytest.approx(TRUE.dot(one.features), rel=0.1)


def test_nothing_costs_less_than_nothing() -> None:
    """The plain least squares of these are (-1, 2): what remains is best without the first."""
    found = least_squares(np.array([[1.0, 1.0], [2.0, 1.5]]), np.ones(2))
    assert found[0] == 0.0
    assert found[1] == pytest.approx(2.5 / 3.25)


def test_least_squares_agree_with_the_best_of_all_sets_of_features() -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        matrix, seconds = rng.standard_normal((9, 4)), rng.random(9) + 0.1
        found = least_squares(matrix, seconds)
        assert (found >= 0).all()
        scaled = matrix / seconds[:, None]
        best = min(_residuals_of_subsets(scaled))
        assert np.sum((scaled @ found - 1) ** 2) == pytest.approx(best, rel=1e-9)


def _residuals_of_subsets(matrix: np.ndarray) -> list[float]:
    """What remains for every set of columns whose plain least squares are not below 0."""
    found = [float(len(matrix))]
    for bits in range(1, 2 ** matrix.shape[1]):
        columns = [i for i in range(matrix.shape[1]) if bits >> i & 1]
        x = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)[0]
        if (x >= 0).all():
            found.append(float(np.sum((matrix[:, columns] @ x - 1) ** 2)))
    return found


def test_what_a_simulation_was_given_is_found_again_by_its_figures() -> None:
    def simulate(x: np.ndarray) -> np.ndarray:
        a, b, c = x
        return np.array([1 + a + b * b, 2 + max(a, 0.3) * b, 3 + b + c, 1 + 0 * c])

    true = np.array([0.5, 0.7, 0.0])
    found = fit_by_simulation(simulate, simulate(true), np.array([0.4, 0.5, 0.2]), np.ones(3))
    assert found == pytest.approx(true, abs=0.05)
    assert found.min() >= 0


def test_what_changes_no_figure_stays_as_it_was() -> None:
    found = fit_by_simulation(
        lambda x: 2 + x[:1], np.array([3.0]), np.array([0.5, 0.7]), np.ones(2)
    )
    assert found == pytest.approx([1.0, 0.7], abs=0.01)


@pytest.mark.parametrize("held_up", [1, 20])
def test_steps_with_their_ratios_take_together_what_was_measured(held_up: int) -> None:
    """One step in nine is held up, which the medians do not see."""
    measured = [
        StepSample(one.group, one.features, one.seconds * (held_up if number % 9 == 0 else 1))
        for number, one in enumerate(samples(noise=0.05))
    ]
    costs = fit_steps(measured)
    ratios = step_ratios(measured, costs)
    assert list(ratios) == ["decode", "mixed"]
    for kind, found in ratios.items():
        alike = [one for one in measured if one.kind == kind]
        modelled = sum(costs.dot(one.features) for one in alike)
        seconds = sum(one.seconds for one in alike)
        assert len(found) == min(NUM_RATIOS, len(alike))
        assert list(found) == sorted(found)
        assert np.mean(found) * modelled == pytest.approx(seconds, rel=1e-9)
        assert found[len(found) // 2] == pytest.approx(1.0, abs=0.25), "most steps are not held up"
        assert (found[-1] > 5) == (held_up > 1)


def test_a_few_steps_are_their_own_ratios() -> None:
    steps = [StepSample("a", StepFeatures(steps=1), seconds) for seconds in (3.0, 1.0)]
    assert step_ratios(steps, StepFeatures(steps=2.0)) == {"decode": (0.5, 1.5)}


def test_errors_are_told_by_the_kind_of_steps() -> None:
    steps = [
        StepSample("a", StepFeatures(steps=1, decode_tokens=1), 1.0),
        StepSample("a", StepFeatures(steps=1, decode_tokens=1), 4.0),
        StepSample("b", StepFeatures(steps=1, prefill_tokens=8), 2.0),
    ]
    errors = errors_by_kind(steps, StepFeatures(steps=2.0))
    assert list(errors) == ["decode", "prefill"]
    decode = errors["decode"]
    assert (decode.num_steps, decode.total) == (2, pytest.approx(-0.2))
    assert decode.median == pytest.approx(0.75)
    assert errors["prefill"].p90 == 0.0


def chunk(start: int, length: int, name: str | None, *, samples: bool) -> ScheduledRequest:
    asked = AskedOutputs((SampleInput(SamplingParams(), 0, 0),) if samples else ())
    adapter = AdapterRef(name, b"d") if name else BASE_MODEL
    return ScheduledRequest("r", adapter, start, (0,) * length, ((),), asked)


def test_the_features_of_a_step_are_counted_from_its_chunks() -> None:
    step = SchedulerOutput(
        1,
        (
            chunk(100, 1, "a", samples=True),
            chunk(9, 1, None, samples=True),
            chunk(0, 16, "a", samples=True),
            chunk(16, 4, "b", samples=False),
        ),
        add_adapters=(b"d",),
    )
    assert step_features(step) == StepFeatures(
        steps=1,
        decode_tokens=2,
        decode_context=101 + 10,
        prefill_tokens=20,
        prefill_context=sum(range(1, 17)) + sum(range(17, 21)),
        prompts=1,
        adapters=2,
        adapter_tokens=1 + 16 + 4,
        new_adapters=1,
    )
