"""What `lora-serve fuzz` plays on: a model, servers of it, and a cold engine beside them."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from lora_serve.bench.catalog import served_models
from lora_serve.bench.http_stream import Origin
from lora_serve.cli.arguments import add_config_arguments, engine_config, server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import EngineConfig, ModelConfig, ParallelConfig, ServerConfig
from lora_serve.config.model import AUTO, OWN_IMPL, QUANTIZATIONS, TRANSFORMERS_IMPL
from lora_serve.config.parallel import ALL_REDUCE, GATHER, SEGMENTS
from lora_serve.demo.model import DemoPaths, ensure_demo
from lora_serve.engine.frontend.startup_checks import check_startup
from lora_serve.errors import AdapterError, ConfigError, LoraServeError
from lora_serve.fuzz.fuzzer import Fuzzer
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.runners import TIER_FLAGS, FreshServers, RunningServer, TraceRunner
from lora_serve.fuzz.small_models import SMALL_MODELS, drawn_model
from lora_serve.fuzz.talks import TEMPLATE
from lora_serve.fuzz.trace import API_KEYS, Trace
from lora_serve.fuzz.versions import write_activated, write_extended, write_versions
from lora_serve.model_info import Vocabulary

if TYPE_CHECKING:  # imports torch
    from lora_serve.models.base import ModelSpec

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

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Stage:
    """What traces of one model are played on, and what they may use."""

    fuzzer: Fuzzer
    scope: Scope


@dataclass
class Stages:
    """The stage of the user's model; without one, the demo's and those of SMALL_MODELS.

    Each is opened when the first trace asks for it: a cold engine takes seconds and memory.
    """

    args: argparse.Namespace
    _open: ExitStack
    _stages: dict[str, Stage] = field(default_factory=dict)

    def trace(self, seed: int) -> Trace:
        model = "" if self.args.model is not None or self.args.url else drawn_model(seed)
        return msgspec.structs.replace(make_trace(seed, self._stage(model).scope), model=model)

    def fuzzer_of(self, trace: Trace) -> Fuzzer:
        """Raises ConfigError if the trace is one of a model that is not known."""
        return self._stage(trace.model).fuzzer

    def _stage(self, model: str) -> Stage:
        if model not in self._stages:
            self._stages[model] = self._open.enter_context(_stage(self.args, model))
        return self._stages[model]


@contextmanager
def opened_stages(args: argparse.Namespace) -> Iterator[Stages]:
    with ExitStack() as stack:
        yield Stages(args, stack)


@contextmanager
def _stage(args: argparse.Namespace, small_model: str) -> Iterator[Stage]:
    """The versions, the cold engine and the server that traces are played on.

    small_model: one of SMALL_MODELS; "" for the user's model or the demo's.
    """
    with tempfile.TemporaryDirectory(prefix="lora-serve-fuzz-") as name:
        model, sources = _model(args, small_model, Path(name))
        flags = _server_flags(args)
        config, server = _configs(model, flags)
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
            runner = _running_server(args, versions, cold.hidden_size)
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
            all_reduced=possible_ranks(config, ALL_REDUCE)[1:],
            model_impls=other_impls(config, sources),
            quantizations=QUANTIZATIONS if config.model.quantization is None else (),
        )
        try:
            fuzzer = Fuzzer(runner, cold, config.cache.block_size, args.serve_args)
            yield Stage(fuzzer, scope)
        finally:
            cold.close()


def _running_server(
    args: argparse.Namespace, versions: Sequence[Path], hidden_size: int
) -> RunningServer:
    """The server of --url, which is given the versions."""
    return RunningServer(
        url=args.url,
        api_key=args.api_key,
        base_model=_served_model(args.url, args.api_key),
        versions=versions,
        hidden_size=hidden_size,
    )


def possible_ranks(config: EngineConfig, reduce: str = GATHER) -> tuple[int, ...]:
    """Among how many ranks this machine's cores, or GPUs, can run the model; 1 without ranks."""

    def of_size(size: int) -> EngineConfig:
        parallel = ParallelConfig(tensor_parallel_size=size, tensor_parallel_reduce=reduce)
        return replace(config, parallel=parallel)

    return tuple(size for size in WORLD_SIZES if _can_start(of_size, size))


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
    if not all(_can_start(run_by, impl) for impl in (OWN_IMPL, TRANSFORMERS_IMPL)):
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


def _can_start(config_of: Callable[[Choice], EngineConfig], choice: Choice) -> bool:
    """Whether there can be such a config, and an engine of it."""
    try:
        check_startup(config_of(choice))
    except LoraServeError:
        return False
    return True


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


def _model(args: argparse.Namespace, small_model: str, directory: Path) -> tuple[str, list[Path]]:
    """The model and adapters for it. directory: where a small model is written."""
    if small_model and (args.model is not None or args.url):
        raise ConfigError(
            f"the trace is one of the fuzzer's own model {small_model!r}; leave out --model and "
            "--url"
        )
    if args.model is None:
        if args.adapters:
            raise ConfigError("--adapters needs --model, the model that they are for")
        demo = ensure_demo(lambda line: print(line, file=sys.stderr))
        if small_model:
            demo = _written(small_model, demo, directory / small_model)
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


def _written(small_model: str, demo: DemoPaths, directory: Path) -> DemoPaths:
    if small_model not in SMALL_MODELS:
        raise ConfigError(
            f"the trace is one of the model {small_model!r}; known are {', '.join(SMALL_MODELS)}"
        )
    return SMALL_MODELS[small_model](demo, directory)
