"""What each feature of a step costs, by measured steps: least squares of relative errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_serve.bench.summary import percentile
from lora_serve.simulate.costs import Errors
from lora_serve.simulate.features import FEATURE_NAMES, StepFeatures

Array = npt.NDArray[np.float64]
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step. Those of one group and kind are alike, but for noise."""

    group: str
    features: StepFeatures
    seconds: float

    @property
    def kind(self) -> str:
        if not self.features.prefill_tokens:
            return "decode"
        return "mixed" if self.features.decode_tokens else "prefill"


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


def fit_named(
    rows: Sequence[Mapping[str, float]], seconds: Sequence[float], names: Sequence[str]
) -> StepFeatures:
    """Seconds of the features in `names` alone, from sums of features over whole runs.

    Errors count in seconds here: a run that is modelled well has next to none left.
    """
    matrix = np.array([[row[name] for name in names] for row in rows])
    found = _non_negative(matrix, np.array(seconds))
    return StepFeatures(**dict(zip(names, map(float, found), strict=True)))


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
    by_kind: dict[str, list[StepSample]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.kind].append(sample)
    return {kind: _errors(by_kind[kind], costs) for kind in KINDS if by_kind[kind]}


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


def shown(costs: StepFeatures) -> str:
    """The costs that are not 0, in microseconds."""
    pairs = zip(FEATURE_NAMES, costs.values, strict=True)
    return ", ".join(f"{name} {1e6 * value:.4g} µs" for name, value in pairs if value)
