"""A cost file from recorded steps: `python -m benchmarks.simulate.recorded --output FILE`.

The steps are those of Qwen2.5-0.5B's shape in benchmarks/results/overhead.json, prefill.json and
lora_cost.json, each taken on a quiet machine. What serving adds was not measured there: such a file
compares policies; whoever wants to know what one machine answers, fits it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from lora_serve.bench.machine import Machine
from lora_serve.simulate.costs import Costs, EngineSettings, save_costs
from lora_serve.simulate.features import StepFeatures
from lora_serve.simulate.fit import StepSample, errors_by_kind, fit_steps, shown

RESULTS = Path(__file__).parents[1] / "results"
MODEL = "Qwen2.5-0.5B"
# Seconds of processor time for an adapter of rank 16 on all projections, 17.6 MB, from the page
# cache: read_adapter and Worker.prepare_adapter on the same machine.
READ_SECONDS, PREPARE_SECONDS = 0.030, 0.092
SETTINGS = EngineSettings(num_blocks=21_845, max_model_len=32_768)  # 4 GiB of KV


def decode(num_requests: int, milliseconds: float, num_adapters: int = 0) -> StepSample:
    features = StepFeatures(
        steps=1,
        decode_tokens=num_requests,
        adapters=num_adapters,
        adapter_tokens=num_requests if num_adapters else 0,
    )
    return StepSample(f"{num_requests} {num_adapters}", features, milliseconds / 1e3)


def prefill(num_tokens: int, milliseconds: float, num_adapters: int = 0) -> StepSample:
    features = StepFeatures(
        steps=1,
        prefill_tokens=num_tokens,
        prefill_context=num_tokens * (num_tokens + 1) / 2,
        adapters=num_adapters,
        adapter_tokens=num_tokens if num_adapters else 0,
    )
    return StepSample(f"{num_tokens} {num_adapters}", features, milliseconds / 1e3)


def recorded() -> list[StepSample]:
    overhead, prefills = _read("overhead.json"), _read("prefill.json")
    samples = [
        decode(row["num_requests"], row["step"] / 1e3)
        for row in overhead["rows"]
        if row["model"] == MODEL and row["num_requests"] > 8  # smaller ones are in lora_cost.json
    ]
    samples += [
        prefill(int(num_tokens), parts["step"])
        for num_tokens, parts in prefills["milliseconds"].items()
    ]
    for cost in _read("lora_cost.json")["costs"]:  # its own base, so that machines do not mix
        samples += _with_adapters(cost["step"], cost["milliseconds"], cost["against_milliseconds"])
    return samples


def _with_adapters(step: str, milliseconds: float, against: float) -> list[StepSample]:
    match step:
        case "prefill of 1,024, an adapter":
            return [prefill(1024, against), prefill(1024, milliseconds, 1)]
        case "1 request, an adapter":
            return [decode(1, against), decode(1, milliseconds, 1)]
        case "8 of one adapter":
            return [decode(8, against), decode(8, milliseconds, 1)]
        case "8 of 8 adapters":
            return [decode(8, milliseconds, 8)]
    return []


def _read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    samples = recorded()
    step = fit_steps(samples)
    costs = Costs(
        model=f"{MODEL}'s shape, bf16, from recorded steps",
        machine=msgspec.convert(_read("prefill.json")["machine"], Machine),
        engine=SETTINGS,
        step=step,
        adapter_read_seconds=READ_SECONDS,
        adapter_prepare_seconds=PREPARE_SECONDS,
        errors=errors_by_kind(samples, step),
    )
    save_costs(costs, args.output)
    print(shown(step))
    for kind, errors in costs.errors.items():
        print(f"{kind}: {errors.num_steps} steps, {errors.median:.1%} off at the median")


if __name__ == "__main__":
    main()
