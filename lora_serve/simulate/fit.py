"""What each feature of a step costs, by measured steps: least squares of relative errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from lora_serve.bench.summary import percentile
from lora_serve.simulate.costs import Errors, ProcessWork
from lora_serve.simulate.features import KINDS, StepFeatures

Array = npt.NDArray[np.float64]
NUM_RATIOS = 100  # of each kind of steps
NUM_ROUNDS, DOUBT_COSTS = 3, 0.03


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step. Those of one group and kind are alike, but for noise."""

    group: str
    features: StepFeatures
    seconds: float

    @property
    def kind(self) -> str:
        return self.features.kind


def fit_steps(samples: Iterable[StepSample]) -> StepFeatures:
    """Seconds of each feature, from the medians of each group.

    Raises:
        ValueError: there are no samples.
    """
    groups: dict[tuple[str, str], list[StepSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group, sample.kind].append(sample)
    if not groups:
        raise ValueError("no steps were measured")
    features = np.array(
        [np.mean([one.features.values for one in group], axis=0) for group in groups.values()]
    )
    seconds = np.array([np.median([one.seconds for one in group]) for group in groups.values()])
    return StepFeatures(*map(float, least_squares(features, seconds)))


def step_ratios(samples: Iterable[StepSample], costs: StepFeatures) -> dict[str, tuple[float, ...]]:
    """Measured to modelled times, by kind: what steps deviate, and what medians leave out.

    A few steps take far longer than their like, so all steps together take longer than the medians
    say. Each ratio is the mean of a part of the sorted ones, the parts are alike large, and their
    mean is what all steps of the kind took together, to what the costs say.
    """
    found = {}
    for kind, alike in _by_kind(samples).items():
        seconds = np.array([sample.seconds for sample in alike])
        modelled = np.array([costs.dot(sample.features) for sample in alike])
        parts = np.array_split(np.sort(seconds / modelled), min(NUM_RATIOS, len(alike)))
        means = np.array([part.mean() for part in parts])
        means *= seconds.sum() / modelled.sum() / means.mean()
        found[kind] = tuple(map(float, means))
    return found


def fit_by_simulation(
    simulate: Callable[[Array], Array], measured: Array, start: Array, doubts: Array
) -> Array:
    """The x ≥ 0 with which simulated figures are nearest to measured ones, as shares of these.

    To be a doubt away from the start counts as much as to be DOUBT_COSTS off in a figure. Each
    round simulates what a small change of each part of x does, and takes figures to change alike
    with larger ones.

    Args:
        measured: (num_figures,), above 0.
        start: (num_parts,), what x is likely to be.
        doubts: (num_parts,), above 0: by how much it may well be another.

    Source: Gauss-Newton, with the step cut as long as it makes things worse.
    """
    stay = np.diag(DOUBT_COSTS / doubts)

    def errors(x: Array, figures: Array) -> Array:
        return np.concatenate([figures / measured - 1, stay @ (x - start)])

    x, figures = start, simulate(start)
    for _ in range(NUM_ROUNDS):
        now = errors(x, figures)
        matrix = np.stack(
            [
                (errors(x + change, simulate(x + change)) - now) / change.sum()
                for change in np.diag(0.1 * doubts)
            ],
            axis=1,
        )
        goal = _non_negative(matrix, matrix @ x - now)
        for part in (1.0, 0.5, 0.25, 0.1):
            near = x + part * (goal - x)
            figures = simulate(near)
            if np.linalg.norm(errors(near, figures)) < np.linalg.norm(now):
                break
        else:
            return x
        x = near
    return x


def least_squares(features: Array, seconds: Array) -> Array:
    """The x ≥ 0 for which features @ x is nearest to seconds, each as a share of its seconds.

    Args:
        features: (num_samples, num_features).
        seconds: (num_samples,), above 0.
    """
    return _non_negative(features / seconds[:, None], np.ones(len(seconds)))


def _non_negative(matrix: Array, target: Array) -> Array:
    """Least squares with x ≥ 0, columns scaled alike.

    Source: algorithm NNLS, Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    x = np.zeros(scaled.shape[1])
    is_free = np.zeros(len(x), bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ target).max()))
    for _ in range(30 * len(x)):
        gradient = np.where(is_free, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= tolerance:
            break
        is_free[gradient.argmax()] = True
        x, is_free = _feasible(scaled, target, x, is_free)
    found: Array = x / scale
    return found


def _feasible(
    matrix: Array, target: Array, x: Array, is_free: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Solve for the free ones, and fix at 0, one by one, those that would go below."""
    while True:
        trial = np.zeros(len(x))
        trial[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
        low = is_free & (trial <= 0)
        if not low.any():
            return trial, is_free
        step = min(1.0, float((x[low] / (x[low] - trial[low] + 1e-300)).min()))
        x = x + step * (trial - x)
        is_free = is_free & (x > 1e-14)
        x = np.where(is_free, x, 0.0)


def errors_by_kind(samples: Iterable[StepSample], costs: StepFeatures) -> dict[str, Errors]:
    """How far single steps are from what the costs say."""
    return {kind: _errors(alike, costs) for kind, alike in _by_kind(samples).items()}


def _by_kind(samples: Iterable[StepSample]) -> dict[str, list[StepSample]]:
    by_kind: dict[str, list[StepSample]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind].append(sample)
    return {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}


def _errors(samples: Sequence[StepSample], costs: StepFeatures) -> Errors:
    modelled = [costs.dot(sample.features) for sample in samples]
    single = sorted(
        abs(model - sample.seconds) / sample.seconds
        for model, sample in zip(modelled, samples, strict=True)
    )
    total = sum(sample.seconds for sample in samples)
    return Errors(
        num_steps=len(samples),
        total=(sum(modelled) - total) / total,
        median=percentile(single, 0.5),
        p90=percentile(single, 0.9),
    )


def shown(costs: StepFeatures | ProcessWork) -> str:
    """The costs that are not 0, in microseconds."""
    pairs = msgspec.structs.asdict(costs).items()
    return ", ".join(f"{name} {1e6 * value:.4g} µs" for name, value in pairs if value)
