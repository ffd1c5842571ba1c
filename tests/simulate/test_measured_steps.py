"""A calibration of an engine that computes nothing sees steps of all kinds, and times each once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from lora_serve.engine.core.executor import make_executor
from lora_serve.model_info import ModelInfo
from lora_serve.simulate.cores import Cores
from lora_serve.simulate.costs import EngineSettings
from lora_serve.simulate.deviations import Deviations
from lora_serve.simulate.events import EventQueue
from lora_serve.simulate.executor import ReplicaClock, SimulatedExecutor
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fit import fit_steps
from lora_serve.simulate.measured_steps import Batch, Calibration
from lora_serve.simulate.replica import model_info


class IdleExecutor(SimulatedExecutor):
    """It has a model of 1,000 tokens, and steps that take no time."""

    def __init__(self) -> None:
        idle = Cores(1, EventQueue()).worker()
        super().__init__(StepFeatures(), Deviations({}), ReplicaClock(), idle)
        self.num_prepared = 0

    def load(self) -> ModelInfo:
        settings = EngineSettings(num_blocks=200, max_model_len=400)
        info = model_info(settings)
        return ModelInfo(
            info.fingerprint, "", 1000, 0, info.max_model_len, info.num_blocks, "", info.kv_groups
        )

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        self.num_prepared += 1


def test_a_calibration_times_steps_of_all_kinds_within_what_the_engine_takes() -> None:
    config = EngineConfig(
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=256),
        lora=LoRAConfig(),
    )
    calibration = Calibration(config, IdleExecutor())
    samples = calibration.measure(1.5)
    calibration.close()
    assert {sample.kind for sample in samples} == {"decode", "prefill", "mixed"}
    assert all(sample.seconds > 0 for sample in samples)
    rows = {sample.features.decode_tokens for sample in samples if sample.kind == "decode"}
    assert max(rows) == 6.0
    assert {1.0, 2.0, 3.0} <= rows
    assert max(sample.features.prefill_tokens for sample in samples) > 200
    assert fit_steps(samples).steps > 0


def test_late_requests_come_one_by_one_beside_those_that_decode() -> None:
    config = EngineConfig(
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=256),
        lora=LoRAConfig(),
    )
    calibration = Calibration(config, IdleExecutor())
    calibration.run(Batch(6, 24, num_late=3))
    calibration.close()
    mixed = [sample.features for sample in calibration.samples if sample.kind == "mixed"]
    assert [one.decode_tokens for one in mixed] == [3.0, 4.0, 5.0]
    assert {one.prefill_tokens for one in mixed} == {24.0}


def test_steps_that_add_an_adapter_are_seen_and_stand_apart(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(model_path), cpu_threads=1),
        cache=CacheConfig(num_gpu_blocks_override=64),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        lora=LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=1),
    )
    calibration = Calibration(config, make_executor(config))
    calibration.load_adapters([*map(str, adapter_paths)])
    for batch in (Batch(2, 24, 1), Batch(1, 24, 1, is_cold=True)) * 4:
        calibration.run(batch)
    calibration.close()
    counts = defaultdict(set)
    for sample in calibration.samples:
        counts[sample.group].add(sample.features.new_adapters)
    assert all(len(each) == 1 for each in counts.values()), "a median is of steps that are alike"
    assert sum(sample.features.new_adapters for sample in calibration.samples) >= 4
