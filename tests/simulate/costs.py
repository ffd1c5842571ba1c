"""Costs of a machine that is not there, in round numbers."""

from __future__ import annotations

from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.features import StepFeatures
from tests.bench.records import MACHINE

ENGINE = EngineSettings(
    num_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_loras=2,
    max_cpu_loras=3,
)
COSTS = Costs(
    model="none",
    machine=MACHINE,
    engine=ENGINE,
    step=StepFeatures(steps=0.01, decode_tokens=0.001, prefill_tokens=0.0005, adapters=0.002),
    request_seconds=0.003,
    adapter_read_seconds=0.2,
    adapter_prepare_seconds=0.05,
)
