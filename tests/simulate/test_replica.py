"""One replica of a simulation decides as the engine over the oracle does, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.bench.workload import WorkloadSpec, make_workload
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.loader import OracleLoader
from lora_serve.messages import EngineMessage, EngineRequest, RestoreAdapters
from lora_serve.simulate.adapters import checkpoint_at
from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.fleet import Fleet
from lora_serve.simulate.replica import Replica
from lora_serve.step import SchedulerOutput
from tests.simulate.costs import BUSY, COSTS, ENGINE

AT_ONCE, BUSY_AT_ONCE = (
    msgspec.structs.replace(costs, adapter_read_seconds=0.0, adapter_prepare_seconds=0.0)
    for costs in (COSTS, BUSY)
)


@dataclass
class Turns:
    """What one replica was told before each of its steps, and the steps themselves."""

    messages: list[list[EngineMessage]] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def record(self, replica: Replica) -> None:
        heard: list[EngineMessage] = []
        core, executor = replica.core, replica.executor
        handle, step, submit = core.handle, core.step, executor.submit

        def note_message(message: EngineMessage) -> None:
            heard.append(message)
            handle(message)

        def note_turn() -> bool:
            self.messages.append(heard.copy())
            heard.clear()
            return step()

        def note_step(output: SchedulerOutput) -> None:
            self.steps.append(output)
            submit(output)

        core.handle, core.step, executor.submit = note_message, note_turn, note_step  # type: ignore[method-assign]


def simulated(spec: WorkloadSpec, settings: EngineSettings, costs: Costs) -> Turns:
    fleet = Fleet(settings, costs, 1)
    turns = Turns()
    turns.record(fleet.replicas[0])
    fleet.run(make_workload(spec))
    return turns


class PathLoader(OracleLoader):
    """The oracle's, with the simulation's adapters at all paths."""

    def _read_file(self, path: str) -> AdapterCheckpoint:
        return checkpoint_at(path)


def real(turns: Turns, settings: EngineSettings) -> list[SchedulerOutput]:
    """The steps of the oracle's engine that is told the same before each of its steps."""
    engine = OracleEngine(
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        fair_share=settings.fair_share,
        enable_prefix_caching=settings.enable_prefix_caching,
        async_scheduling=settings.is_asynchronous,
        loader_class=PathLoader,
    )
    for messages in turns.messages:
        for message in messages:
            assert isinstance(message, EngineRequest | RestoreAdapters)
            engine.handle(message)
        engine.step()
    return engine.executor.steps


def decisions(steps: list[SchedulerOutput]) -> list[object]:
    """All that was decided; which tokens were drawn is the executor's."""
    return [
        (
            [
                (one.request_id, one.adapter, one.start, one.num_tokens, len(one.asked.samples),
                 one.token_from, [list(table) for table in one.block_tables])
                for one in step.requests
            ],
            step.drop_adapters,
            step.add_adapters,
        )
        for step in steps
    ]  # fmt: skip


SPEC = WorkloadSpec(
    num_requests=32,
    input_tokens=40,
    output_tokens=30,
    length_spread=0.8,
    shared_prefix_tokens=32,
    num_prefixes=3,
    request_rate=40.0,
    adapters=("a", "b", "c", "d", "e"),
)


@pytest.mark.parametrize(
    "settings",
    [
        ENGINE,
        msgspec.structs.replace(ENGINE, num_blocks=20),  # so few that requests are preempted
        msgspec.structs.replace(ENGINE, enable_prefix_caching=False, max_num_seqs=3),
        msgspec.structs.replace(ENGINE, is_asynchronous=True, num_blocks=24),
        msgspec.structs.replace(ENGINE, fair_share="adapter", max_num_seqs=4),
    ],
    ids=("plain", "preempting", "uncached", "asynchronous", "fair"),
)
def test_a_replica_decides_as_the_engine_over_the_oracle(settings: EngineSettings) -> None:
    turns = simulated(SPEC, settings, AT_ONCE)
    assert len(turns.steps) > 50
    assert decisions(turns.steps) == decisions(real(turns, settings))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_so_does_one_that_others_take_the_cores_from(is_asynchronous: bool) -> None:
    settings = msgspec.structs.replace(ENGINE, num_blocks=24, is_asynchronous=is_asynchronous)
    turns = simulated(SPEC, settings, BUSY_AT_ONCE)
    assert len(turns.steps) > 50
    assert decisions(turns.steps) == decisions(real(turns, settings))


def _runs_fewer_at_once(settings: EngineSettings) -> EngineSettings:
    return msgspec.structs.replace(settings, max_num_seqs=2)


def _knows_no_cache(settings: EngineSettings) -> EngineSettings:
    return msgspec.structs.replace(settings, enable_prefix_caching=False)


def _keeps_an_adapter_more(settings: EngineSettings) -> EngineSettings:
    return msgspec.structs.replace(settings, max_cpu_loras=settings.max_cpu_loras + 1)


def _has_a_block_less(settings: EngineSettings) -> EngineSettings:
    return msgspec.structs.replace(settings, num_blocks=settings.num_blocks - 1)


@pytest.mark.parametrize(
    "fault", [_runs_fewer_at_once, _knows_no_cache, _keeps_an_adapter_more, _has_a_block_less]
)
def test_a_replica_that_decides_otherwise_is_found(
    fault: Callable[[EngineSettings], EngineSettings],
) -> None:
    settings = msgspec.structs.replace(ENGINE, num_blocks=20)
    turns = simulated(SPEC, fault(settings), AT_ONCE)
    assert decisions(turns.steps) != decisions(real(turns, settings))
