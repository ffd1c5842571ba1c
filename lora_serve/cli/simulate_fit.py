"""A run of `lora-serve simulate fit`: measure steps, then a server, and write a cost file."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lora_serve.bench.catalog import served_models
from lora_serve.bench.client import EVERY_TOKEN, Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.bench.server import cpu_seconds, lora_serve_command, running_server
from lora_serve.cli.arguments import engine_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.serve import add_arguments as add_serve_arguments
from lora_serve.cli.serve_run import with_demo_model, with_smollm2
from lora_serve.config import EngineConfig
from lora_serve.config.model import SMOLLM2
from lora_serve.demo.given_model import given_model
from lora_serve.demo.random_adapters import write_random_adapter
from lora_serve.demo.server_process import free_port
from lora_serve.engine.core.executor import make_executor
from lora_serve.errors import ConfigError
from lora_serve.model_info import ModelInfo
from lora_serve.simulate.costs import Costs, EngineSettings, Processes, save_costs
from lora_serve.simulate.fit import errors_by_kind, fit_steps, shown, step_ratios
from lora_serve.simulate.measured_serving import ServingFit
from lora_serve.simulate.measured_steps import Calibration

NUM_ADAPTERS = 8


def run_fit(args: argparse.Namespace) -> int:
    if not 0 < args.seconds < math.inf:  # as NaN is not
        raise ConfigError(f"--seconds {args.seconds:g} must be a number above 0")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no directory {args.output.parent}")
    words = ([args.model] if args.model else []) + args.serve_args
    config = _config(words)
    name = (*config.model.served_model_name, Path(config.model.model).name)[0]
    with _adapters(config) as paths:
        costs, model = _steps(config, name, paths, args.seconds)
    served = args.model or config.model.model  # smollm2 by its name, which brings its dtype
    costs = asyncio.run(_serving(costs, served, model.vocab_size, args.serve_args))
    save_costs(costs, args.output)
    print(_report(costs))
    print(f"written to {args.output}")
    return 0


def _config(words: list[str]) -> EngineConfig:
    """The engine that `lora-serve serve` would start with these words."""
    parser = OneLineParser(prog="lora-serve simulate fit … --serve-args")
    add_serve_arguments(parser)
    args = parser.parse_args(words)
    if "host" in args or "port" in args:
        raise ConfigError("--serve-args has --host or --port; the server gets a free port itself")
    config = engine_config(args)
    if config.model.model == SMOLLM2:
        return with_smollm2(config)
    return config if config.model.model else with_demo_model(config)


@contextmanager
def _adapters(config: EngineConfig) -> Iterator[list[str]]:
    """Paths of adapters that are made up for the model, and are there while the context lasts."""
    if not config.lora.enable_lora:
        print("without --enable-lora adapters are not measured, and cost nothing", file=sys.stderr)
        yield []
        return
    model = given_model(config.model.model, lambda line: print(line, file=sys.stderr))
    with TemporaryDirectory(prefix="lora-serve-simulate-") as directory:
        paths = [Path(directory) / f"adapter-{number}" for number in range(NUM_ADAPTERS)]
        for seed, path in enumerate(paths):
            write_random_adapter(path, model.projections, model.model, seed, 0.1)
        yield list(map(str, paths))


def _steps(
    config: EngineConfig, name: str, paths: list[str], seconds: float
) -> tuple[Costs, ModelInfo]:
    print(f"timing the steps of {name} for about {seconds:g} s", file=sys.stderr)
    lora = replace(config.lora, lora_modules=(), lora_allowed_roots=())
    calibration = Calibration(replace(config, lora=lora), make_executor(config))
    read_seconds, prepare_seconds = calibration.load_adapters(paths) if paths else (0.0, 0.0)
    samples = calibration.measure(seconds, lambda line: print(f"  {line}", file=sys.stderr))
    step = fit_steps(samples)
    costs = Costs(
        model=name,
        machine=describe_machine(),
        engine=_settings(config, calibration.model),
        step=step,
        ratios=step_ratios(samples, step),
        processes=Processes(engine_threads=calibration.busy_cores),
        adapter_read_seconds=read_seconds,
        adapter_prepare_seconds=prepare_seconds,
        errors=errors_by_kind(samples, step),
    )
    calibration.close()
    return costs, calibration.model


def _settings(config: EngineConfig, model: ModelInfo) -> EngineSettings:
    scheduler, lora = config.scheduler, config.lora
    is_asynchronous = scheduler.async_scheduling
    return EngineSettings(
        num_blocks=model.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        fair_share=scheduler.fair_share,
        is_asynchronous=model.is_asynchronous if is_asynchronous is None else is_asynchronous,
        windows=tuple(group.window for group in model.kv_groups),
        max_loras=lora.max_loras,
        max_cpu_loras=lora.cpu_lora_limit,
    )


async def _serving(costs: Costs, model: str, vocab_size: int, serve_args: list[str]) -> Costs:
    print("timing a server", file=sys.stderr)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="lora-serve-simulate-") as directory:
        command = lora_serve_command(model, port, serve_args)
        async with running_server(command, url, Path(directory) / "server.log") as pid:
            origin = Origin.parse(url)
            served = await served_models(origin)
            endpoint = Endpoint(origin, served.models[0], extra_body=EVERY_TOKEN)
            fit = ServingFit(endpoint, vocab_size, lambda: cpu_seconds(pid))
            return await fit.fit(costs)


def _report(costs: Costs) -> str:
    processes = costs.processes
    lines = [
        f"a step in the engine: {shown(costs.step)}, on {processes.engine_threads:.2f} cores",
        f"more in a server:     {shown(costs.serving) or 'nothing'}",
        f"the API process:      {shown(processes.api) or 'nothing'}",
        f"the client:           {shown(processes.client) or 'nothing'}",
        f"a request's way:      {1e3 * costs.request_seconds:.2f} ms",
    ]
    if costs.adapter_read_seconds or costs.adapter_prepare_seconds:
        lines.append(
            f"an adapter:           read in {1e3 * costs.adapter_read_seconds:.1f} ms, prepared in "
            f"{1e3 * costs.adapter_prepare_seconds:.1f} ms"
        )
    for kind, errors in costs.errors.items():
        lines.append(
            f"{kind} steps: {errors.num_steps} timed, {errors.total:+.1%} in all before the mean "
            f"ratio of {costs.mean_ratios[kind]:.3f}, {errors.median:.1%} at the median, "
            f"{errors.p90:.1%} for 90 of 100"
        )
    return "\n".join(lines)
