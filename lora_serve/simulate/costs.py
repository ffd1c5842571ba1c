"""A cost file: what a step, a request and an adapter cost one replica, and where that was measured.

`lora-serve simulate fit` writes one. Its engine settings are those of the server that was measured;
a simulation may ask for others.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from lora_serve.bench.machine import Machine
from lora_serve.errors import ConfigError
from lora_serve.simulate.features import KINDS, StepFeatures

FORMAT: Literal["lora-serve/costs/1"] = "lora-serve/costs/1"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how an engine schedules. windows: of each group of layers, None for no window.

    max_cpu_loras: how many adapters a replica keeps in memory.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    fair_share: str = "none"
    is_asynchronous: bool = False
    windows: tuple[int | None, ...] = (None,)
    max_loras: int = 8
    max_cpu_loras: int = 64


class Errors(msgspec.Struct, frozen=True):
    """How far the model is from steps that were measured, as shares of the measured times.

    total: of all steps' time together, which may cancel out; median and p90: of single steps.
    """

    num_steps: int
    total: float
    median: float
    p90: float


class ProcessWork(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one core that a process works for each thing that passes through it.

    begin, first, end: for a request, before the engine has it, at its first token, and behind its
    last. prompt_token: of its prompt. message: what a step gave all requests. token: one that a
    request got.
    """

    begin: float = 0.0
    first: float = 0.0
    end: float = 0.0
    prompt_token: float = 0.0
    message: float = 0.0
    token: float = 0.0


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """What shares the cores with the engine. Each process has one thread.

    engine_threads: how many cores a step keeps busy.
    """

    engine_threads: float = 1.0
    api: ProcessWork = ProcessWork()
    client: ProcessWork = ProcessWork()


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. step: in the engine, alone on the machine. serving: more in a server.

    ratios: measured times of steps to those by `step`, by the kind of steps, each as likely as the
    others; steps of a kind without ratios take what `step` says.
    processes: what works beside the engine. request_seconds: how long a request is on its way
    without work for anybody. adapter_read_seconds: of one adapter, several at a time;
    adapter_prepare_seconds: what comes behind it, one adapter after the other.
    errors: of `step`, by the kind of steps.
    """

    format: Literal["lora-serve/costs/1"] = FORMAT
    model: str
    machine: Machine
    engine: EngineSettings
    step: StepFeatures
    serving: StepFeatures = StepFeatures()
    ratios: dict[str, tuple[float, ...]] = {}
    processes: Processes = Processes()
    request_seconds: float = 0.0
    adapter_read_seconds: float = 0.0
    adapter_prepare_seconds: float = 0.0
    errors: dict[str, Errors] = {}

    @property
    def seconds_of(self) -> StepFeatures:
        """What each feature of a step costs in a server."""
        return self.step.plus(self.serving)

    @property
    def least_seconds_of(self) -> StepFeatures:
        """What each feature costs at least, in the mean of many steps."""
        ratio = min((1.0, *self.mean_ratios.values()))
        return StepFeatures(*(ratio * seconds for seconds in self.seconds_of.values))

    @property
    def mean_ratios(self) -> dict[str, float]:
        return {kind: fmean(ratios) for kind, ratios in self.ratios.items()}


def save_costs(costs: Costs, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


def load_costs(path: Path) -> Costs:
    """Read what save_costs wrote. Raises ConfigError if it cannot be read, or is something else."""
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise ConfigError(f"--cost {path}: cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--cost {path}: not a cost file ({error}); `lora-serve simulate fit` writes one"
        ) from error
    seconds = (
        *costs.seconds_of.values,
        *(costs.request_seconds, costs.adapter_read_seconds, costs.adapter_prepare_seconds),
        *msgspec.structs.astuple(costs.processes.api),
        *msgspec.structs.astuple(costs.processes.client),
    )
    if min(seconds) < 0 or costs.seconds_of.steps <= 0:
        raise ConfigError(
            f"--cost {path}: want no time below 0, and more than 0 for a step; fit it anew"
        )
    _check_deviations(costs, path)
    return costs


def _check_deviations(costs: Costs, path: Path) -> None:
    for kind, ratios in costs.ratios.items():
        if kind not in KINDS or not ratios or min(ratios) <= 0:
            raise ConfigError(
                f"--cost {path}: ratios of {kind!r} steps must be above 0, at least one, and of "
                f"one of {', '.join(KINDS)}; fit it anew"
            )
    if costs.processes.engine_threads <= 0:
        raise ConfigError(
            f"--cost {path}: engine_threads {costs.processes.engine_threads:g} must be above 0; "
            "fit it anew"
        )
