"""A run of `lora-serve bench`: the server, the requests, the table and the files."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lora_serve.bench.catalog import served_models
from lora_serve.bench.client import Endpoint
from lora_serve.bench.goodput import Limits
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import run_load
from lora_serve.bench.machine import describe_machine
from lora_serve.bench.plots import NO_PLOTS, can_plot, check_plot_path, plot_latencies
from lora_serve.bench.progress import Progress
from lora_serve.bench.report import Run, save_json, text_report
from lora_serve.bench.server import lora_serve_command, running_server
from lora_serve.bench.workload import (
    CLOSED_LOOP_CONCURRENCY,
    TimedRequest,
    WorkloadSpec,
    make_workload,
)
from lora_serve.bench.workload_file import load_workload, save_workload
from lora_serve.cli.server_arguments import chosen_key
from lora_serve.demo.server_process import free_port
from lora_serve.errors import ConfigError

EXIT_FAILED_REQUESTS = 1


def run_bench(args: argparse.Namespace) -> int:
    """Measure, and print the table. 1 if any request failed, so that scripts notice."""
    if args.plot:
        check_plot_path(args.plot)
    Limits.parse(args.goodput)
    return asyncio.run(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    async with _target(args) as (url, origin):
        endpoint, adapters = await _endpoint(args, origin)
        requests, source = _workload(args, adapters)
        run = await _measure(args, endpoint, url, requests, source)
    print(text_report(run))
    if args.json:
        save_json(run, args.json)
    _plot(args, run)
    return EXIT_FAILED_REQUESTS if any(r.error for r in run.result.records) else 0


@asynccontextmanager
async def _target(args: argparse.Namespace) -> AsyncIterator[tuple[str, Origin]]:
    """The server to measure: the one at --url, or one started for this run."""
    if args.url:
        if args.serve_args:
            raise ConfigError("--serve-args needs --model; the server at --url runs already")
        yield args.url, Origin.parse(args.url)
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="lora-serve-bench-") as directory:
        log = Path(directory) / "server.log"
        print(f"starting a server for {args.model}", file=sys.stderr)
        async with running_server(lora_serve_command(args.model, port, args.serve_args), url, log):
            yield url, Origin.parse(url)


async def _endpoint(args: argparse.Namespace, origin: Origin) -> tuple[Endpoint, Sequence[str]]:
    """How to ask, and the adapters' names; the server is asked for what was not given."""
    ask_all = args.adapters == ["all"]
    api_key = chosen_key(args, os.environ)
    names, adapters = ([args.served_model], args.adapters)
    if not args.served_model or ask_all:
        catalog = await served_models(origin, api_key)
        names = names if args.served_model else list(catalog.models)
        adapters = list(catalog.adapters) if ask_all else adapters
    return Endpoint(origin, names[0], api_key), adapters


def _workload(
    args: argparse.Namespace, adapters: Sequence[str]
) -> tuple[tuple[TimedRequest, ...], WorkloadSpec | str]:
    if args.workload:
        return load_workload(args.workload), str(args.workload)
    spec = workload_spec(args, adapters)
    requests = make_workload(spec)
    if args.save_workload:
        save_workload(requests, args.save_workload)
    return requests, spec


def workload_spec(args: argparse.Namespace, adapters: Sequence[str]) -> WorkloadSpec:
    """What the flags of `bench.add_workload_arguments` ask for, over these adapters."""
    return WorkloadSpec(
        seed=args.seed,
        num_requests=args.num_requests,
        input_tokens=args.input_len,
        output_tokens=args.output_len,
        shared_prefix_tokens=args.shared_prefix_len,
        num_prefixes=args.num_prefixes,
        prefix_seed=args.prefix_seed,
        length_spread=args.length_spread,
        adapters=tuple(adapters),
        popularity=args.popularity,
        zipf_exponent=args.zipf_exponent,
        request_rate=args.request_rate,
        vocab_size=args.vocab_size,
    )


async def _measure(
    args: argparse.Namespace,
    endpoint: Endpoint,
    url: str,
    requests: Sequence[TimedRequest],
    source: WorkloadSpec | str,
) -> Run:
    await run_load(endpoint, _warmups(requests, args.num_warmups), 1)
    machine, limit = describe_machine(), _max_concurrency(args)
    progress = Progress(len(requests), sys.stderr)
    result = await run_load(endpoint, requests, limit, progress)
    progress.close()
    return Run(
        title=f"bench {args.mode}",
        url=url,
        model=endpoint.model,
        workload=source,
        max_concurrency=limit,
        machine=machine,
        result=result,
        limits=Limits.parse(args.goodput) if args.goodput else None,
    )


def _max_concurrency(args: argparse.Namespace) -> int | None:
    has_times = args.request_rate is not None or args.workload is not None
    if args.mode == "serve" and args.max_concurrency is None and not has_times:
        return CLOSED_LOOP_CONCURRENCY
    limit: int | None = args.max_concurrency
    if limit is not None and limit < 1:
        raise ConfigError(f"--max-concurrency {limit} must be at least 1")
    return limit


def _warmups(requests: Sequence[TimedRequest], count: int) -> list[TimedRequest]:
    """The first requests with their prompts reversed: the same work, and no prefix left behind."""
    return [
        replace(request, prompt_token_ids=request.prompt_token_ids[::-1], at_seconds=0.0)
        for request in requests[:count]
    ]


def _plot(args: argparse.Namespace, run: Run) -> None:
    if not args.plot:
        return
    if can_plot():
        plot_latencies({run.title: run.result}, args.plot)
    else:
        print(f"lora-serve: {NO_PLOTS}", file=sys.stderr)
