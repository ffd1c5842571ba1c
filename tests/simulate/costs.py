"""Costs of a machine that is not there, in round numbers."""

from __future__ import annotations

import msgspec

from lora_serve.simulate.costs import Costs, EngineSettings, Processes, ProcessWork
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
# The same beside an API process and a client, with steps that deviate. The machine has two cores.
BUSY = msgspec.structs.replace(
    COSTS,
    ratios={"decode": (0.9, 1.0, 1.3), "prefill": (0.8, 1.4), "mixed": (1.0, 1.1)},
    processes=Processes(
        engine_threads=2.0,
        api=ProcessWork(
            begin=0.003, first=0.002, end=0.001, prompt_token=2e-5, message=0.001, token=0.0005
        ),
        client=ProcessWork(begin=0.0015, first=0.001, end=0.0005, prompt_token=1e-5, token=0.0004),
    ),
)
