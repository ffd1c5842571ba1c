"""`lora-serve fuzz` on real kernels: servers, a cold engine beside them, a table at the end."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lora_serve.bench.catalog import served_models
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.cli.arguments import add_config_arguments, engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import EngineConfig, ModelConfig, ParallelConfig, ServerConfig
from lora_serve.config.model import AUTO, OWN_IMPL, QUANTIZATIONS, TRANSFORMERS_IMPL
from lora_serve.config.parallel import GATHER, SEGMENTS
from lora_serve.demo.model import ensure_demo
from lora_serve.engine.frontend.startup_checks import check_startup
from lora_serve.errors import AdapterError, ConfigError, LoraServeError
from lora_serve.fuzz.counts import FuzzCounts, Kind
from lora_serve.fuzz.fuzzer import Fuzzer, Verdict
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.progress import ProgressLine
from lora_serve.fuzz.runners import TIER_FLAGS, FreshServers, RunningServer, TraceRunner
from lora_serve.fuzz.talks import TEMPLATE
from lora_serve.fuzz.trace import API_KEYS, Trace, load_trace, save_trace
from lora_serve.fuzz.versions import write_activated, write_extended, write_versions
from lora_serve.model_info import Vocabulary

if TYPE_CHECKING:  # imports torch
    from lora_serve.models.base import ModelSpec

EXIT_WRONG = 1
DEFAULT_NUM_REQUESTS = 1000
FAULTS = ("kill", "tier")
SERVED_NAME = "base"
SERVER_FLAGS = (
    *("--served-model-name", SERVED_NAME, "--max-model-len", "512"),
    *("--enable-lora", "--enable-prompt-embeds", "--validate"),
    *("--lm-head-screen", "on"),  # small as it is, so that greedy answers come by way of it
    *("--api-key", *API_KEYS, "--allow-runtime-lora-updating"),
    "--batch-invariant",  # as it always is on CPUs; on a GPU rounding would be taken for faults
)
WORLD_SIZES = (1, 2, 3, 4)
MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Stage:
    fuzzer: Fuzzer
    scope: Scope


def run_live(args: argparse.Namespace) -> int:
    """0 if every answer was the lone one; else 1, a small trace, and how to repeat it."""
    with _stage(args) as stage:
        if args.replay is not None:
            return _replay(args, stage)
        return _fuzz(args, stage)


def _fuzz(args: argparse.Namespace, stage: _Stage) -> int:
    started = time.monotonic()
    limit = args.num_requests or (DEFAULT_NUM_REQUESTS if args.duration is None else None)
    progress, found, failed = ProgressLine(sys.stderr), FuzzCounts(args.seed), None
    for seed in count(args.seed):
        trace = make_trace(seed, stage.scope)
        verdict = stage.fuzzer.check(trace)
        found.add(trace, verdict.run, verdict.findings)
        seconds = time.monotonic() - started
        done = f"{found.num_requests:,}" + (f" of {limit:,}" if limit else "")
        progress.show(
            f"{done} requests in {found.traces} traces, {found.num_wrong} wrong answers, "
            f"{found.num_requests / seconds:.1f}/s"
        )
        if not verdict.is_clean:
            failed = trace, verdict
            break
        is_late = args.duration is not None and seconds >= args.duration
        if is_late or (limit is not None and found.num_requests >= limit):
            break
    progress.close()
    print(_table(found, time.monotonic() - started))
    _save(args.json, found, failed[1] if failed else None)
    if failed is None:
        return 0
    _explain(args, stage, *failed)
    return EXIT_WRONG


def _replay(args: argparse.Namespace, stage: _Stage) -> int:
    """Play one trace until it fails, at most --times."""
    trace = load_trace(args.replay)
    for number in range(args.times):
        verdict = stage.fuzzer.check(trace)
        if not verdict.is_clean:
            print(f"failed the {_ordinal(number + 1)} time")
            _show(verdict)
            return EXIT_WRONG
    print(f"{args.replay}: {trace.num_requests} requests, {args.times} times, all as if alone")
    return 0


def _explain(args: argparse.Namespace, stage: _Stage, trace: Trace, verdict: Verdict) -> None:
    print(f"\nthe trace of seed {trace.seed} fails:")
    _show(verdict)
    path = args.failure or Path(f"fuzz-{trace.seed}.json")
    save_trace(trace, path)
    progress = ProgressLine(sys.stderr)
    if args.shrink_seconds > 0:
        small = stage.fuzzer.shrink(
            trace,
            args.shrink_seconds,
            lambda found: progress.show(f"still fails with {len(found.events)} events"),
        )
        progress.close()
        save_trace(small, path)
        print(f"made small: {len(small.events)} of {len(trace.events)} events")
    print(f"repeat it with: {_command(args, path)}")


def _show(verdict: Verdict) -> None:
    lines = verdict.lines()
    for line in lines[:MOST_SHOWN]:
        print(f"  {line}")
    if len(lines) > MOST_SHOWN:
        print(f"  … and {len(lines) - MOST_SHOWN} more")


def _command(args: argparse.Namespace, path: Path) -> str:
    words = ["lora-serve", "fuzz", "--replay", str(path)]
    for flag in ("model", "url", "redis_url"):
        if getattr(args, flag) is not None:
            words += [f"--{flag.replace('_', '-')}", getattr(args, flag)]
    if args.adapters:
        words += ["--adapters", *map(str, args.adapters)]
    if args.serve_args:
        words += ["--serve-args", *args.serve_args]
    return shlex.join(words)


def possible_ranks(config: EngineConfig, reduce: str = GATHER) -> tuple[int, ...]:
    """Among how many ranks this machine's cores, or GPUs, can run the model; 1 without ranks."""

    def of_size(size: int) -> EngineConfig:
        parallel = ParallelConfig(tensor_parallel_size=size, tensor_parallel_reduce=reduce)
        return replace(config, parallel=parallel)

    return tuple(size for size in WORLD_SIZES if _can_start(of_size(size)))


def other_impls(config: EngineConfig, adapters: Sequence[Path] = ()) -> tuple[str, ...]:
    """What can run the model here beside its family; nothing if the user chose what does.

    adapters: which it must be able to serve, too.
    """
    from lora_serve.worker.device import open_device  # imports torch

    def run_by(impl: str) -> EngineConfig:
        return replace(config, model=replace(config.model, model_impl=impl))

    if (
        config.model.model_impl != AUTO
        or open_device(config.model.device).torch_device.type != "cpu"
    ):
        return ()
    if not all(_can_start(run_by(impl)) for impl in (OWN_IMPL, TRANSFORMERS_IMPL)):
        return ()
    other = run_by(TRANSFORMERS_IMPL)
    return (TRANSFORMERS_IMPL,) if all(_serves(other, path) for path in adapters) else ()


def _serves(config: EngineConfig, adapter: Path) -> bool:
    from lora_serve.adapters.checkpoint import read_adapter
    from lora_serve.models.base import adapted_modules  # imports torch

    modules = adapted_modules(_spec(config.model))
    try:
        read_adapter(str(adapter), lora_modules=modules, max_lora_rank=config.lora.max_lora_rank)
    except AdapterError:
        return False
    return True


def _can_start(config: EngineConfig) -> bool:
    try:
        check_startup(config)
    except LoraServeError:
        return False
    return True


# ── what is played on ───────────────────────────────────────────────────────────────────────


@contextmanager
def _stage(args: argparse.Namespace) -> Iterator[_Stage]:
    """The versions, the cold engine and the server that traces are played on."""
    model, sources = _model(args)
    flags = _server_flags(args)
    config, server = _configs(model, flags)
    with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
        library = Path(name) / "versions"
        versions = (*write_versions(sources, library), write_activated(sources[0], library))
        num_for_all = len(versions)
        vocabulary, experts = _adapted(config.model)
        if vocabulary is not None:
            versions = (*versions, write_extended(sources[0], vocabulary, experts, library))
        from lora_serve.fuzz.reference import ColdEngine  # slow to import; not for --help

        cold = ColdEngine(config, versions, server, num_for_all)
        runner: TraceRunner
        if args.url:
            runner = RunningServer(
                url=args.url,
                api_key=args.api_key,
                base_model=_served_model(args.url, args.api_key),
                versions=versions,
                hidden_size=cold.hidden_size,
            )
        else:
            runner = FreshServers(
                model=Path(model),
                base_model=SERVED_NAME,
                flags=flags,
                versions=versions,
                hidden_size=cold.hidden_size,
                workspace=Path(name),
                redis_url=args.redis_url,
            )
        scope = Scope(
            vocab_size=cold.vocab_size,
            num_versions=len(versions),
            num_versions_for_all=num_for_all,
            num_requests=args.requests_per_trace,
            concurrency=args.concurrency,
            faults=() if args.url else _faults(args.faults),
            tiers=tuple(name for name in TIER_FLAGS if args.redis_url or name != "redis"),
            has_chat=cold.has_chat,
            marks_reasoning=cold.marks_reasoning,
            has_embeds=config.model.enable_prompt_embeds,
            fixed_flags=bool(args.url),
            num_ranks=possible_ranks(config)[1:],
            in_segments=possible_ranks(config, SEGMENTS),
            model_impls=other_impls(config, sources),
            quantizations=QUANTIZATIONS if config.model.quantization is None else (),
        )
        try:
            fuzzer = Fuzzer(runner, cold, config.cache.block_size, args.serve_args)
            yield _Stage(fuzzer, scope)
        finally:
            cold.close()


def _adapted(config: ModelConfig) -> tuple[Vocabulary | None, dict[str, tuple[int, int]]]:
    """What adapters may change of the model's vocabulary, and on CPUs of its experts."""
    from lora_serve.models.base import lora_modules  # imports torch
    from lora_serve.worker.device import open_device

    on_gpu = open_device(config.device).counts_memory
    spec = _spec(config)
    return spec.vocabulary(), {} if on_gpu else lora_modules(spec.expert_linears())


def _spec(config: ModelConfig) -> ModelSpec:
    from lora_serve.models.source import load_spec, model_path  # imports torch

    directory = model_path(config.model, config.revision, config.load_format, with_weights=False)
    return load_spec(directory, config.load_format, config.model_impl)


def _model(args: argparse.Namespace) -> tuple[str, list[Path]]:
    if args.model is None:
        if args.adapters:
            raise ConfigError("--adapters needs --model, the model that they are for")
        demo = ensure_demo(lambda line: print(line, file=sys.stderr))
        return str(demo.model), [demo.alpha, demo.beta]
    if not args.adapters:
        raise ConfigError("--model needs --adapters, one or more directories of adapters for it")
    return args.model, args.adapters


def _server_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """What the server is started with, or, at a URL, has been: it decides the reference's bits."""
    if args.url:
        return tuple(args.serve_args)
    own = ("--chat-template", TEMPLATE) if args.model is None else ()
    return (*SERVER_FLAGS, *own, *args.serve_args)


def _configs(model: str, flags: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    parser = OneLineParser(prog="lora-serve fuzz --serve-args")
    add_config_arguments(parser)
    given = parser.parse_args([model, *flags])
    return engine_config(given), server_config(given)


def _served_model(url: str, api_key: str | None) -> str:
    return asyncio.run(served_models(Origin.parse(url), api_key)).models[0]


def _faults(text: str) -> tuple[str, ...]:
    chosen = tuple(name for name in text.split(",") if name not in ("", "none"))
    for name in chosen:
        if name not in FAULTS:
            raise ConfigError(f"--faults {name} is not one of {', '.join(FAULTS)} or none")
    return chosen


# ── what came of it ─────────────────────────────────────────────────────────────────────────


def _table(found: FuzzCounts, seconds: float) -> str:
    columns = ("requests", "whole", "begun", "left", "aborted", "refused", "answers", "tokens",
               "wrong")  # fmt: skip
    lines = [f"{'':<18}" + "".join(f"{name:>10}" for name in columns)]
    total = Kind()
    for name, kind in sorted(found.kinds.items()):
        lines.append(_row(name, kind))
        for field in Kind.__struct_fields__:
            setattr(total, field, getattr(total, field) + getattr(kind, field))
    lines.append(_row("all", total))
    share = found.cached_tokens / max(1, found.prompt_tokens)
    facts = {
        "traces": f"{found.traces:,}",
        "cached": f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens ({share:.0%})",
        **{name.replace("_", " "): f"{number:,}" for name, number in found.counts.items()},
        **{name: f"{number:,}" for name, number in sorted(found.events.items())},
        "seconds": f"{seconds:,.0f}",
        "wrong answers": f"{found.num_wrong:,}",
    }
    return "\n".join([*lines, "", *(f"{name:<20}{value}" for name, value in facts.items())])


def _row(name: str, kind: Kind) -> str:
    numbers = (kind.requests, kind.whole, kind.begun, kind.left, kind.aborted, kind.refused,
               kind.choices, kind.tokens, kind.wrong)  # fmt: skip
    return f"{name:<18}" + "".join(f"{number:>10,}" for number in numbers)


def _save(path: Path | None, found: FuzzCounts, failed: Verdict | None) -> None:
    if path is None:
        return
    document = {
        "machine": describe_machine(),
        "tally": found,
        "failures": failed.lines() if failed else [],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
