"""What an engine would refuse, told before any weight is read, and all of it at once.

The engine checks all of this again where it matters; here it costs milliseconds, there it is found
minutes later, after a download or a gigabyte of weights. Reads small files and headers only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lora_serve.adapters.checkpoint import CONFIG_NAME, check_adapter
from lora_serve.adapters.location import HubAdapter, download_from_hub, find_adapter
from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig, ParallelConfig
from lora_serve.config.model import RANDOM_WEIGHTS
from lora_serve.config.refusals import Refusals
from lora_serve.engine.frontend.pooling_defaults import pooling_defaults
from lora_serve.engine.kv_event_sockets import check_endpoints
from lora_serve.errors import (
    AdapterNotFoundError,
    AdapterUnavailableError,
    ConfigError,
    LoraServeError,
)
from lora_serve.gguf.location import names_gguf
from lora_serve.kv_tiers.opening import check_tiers
from lora_serve.model_info import Vocabulary
from lora_serve.structured_output.backend import require_installed
from lora_serve.text.tokenizer_files import check_same_tokens, check_tokenizer_files

if TYPE_CHECKING:
    from lora_serve.models.base import ModelSpec

Got = TypeVar("Got")
_FEWEST_STORED_BITS = 2  # of a weight, in the formats of checkpoints

# (out_features, in_features) of each projection that adapters may change, and the vocabulary.
Adapted = tuple[Mapping[str, tuple[int, int]] | None, Vocabulary | None]


def check_startup(config: EngineConfig) -> None:
    """Refuse what no engine could start with.

    Raises:
        LoraServeError: the one refusal, or a ConfigError with a line for each of several.
    """
    refusals = Refusals()
    adapted: Adapted = (None, None)
    with refusals.noted():
        adapted = _check_model(config.model, config.parallel)
    with refusals.noted():
        _check_draft_model(config)
    with refusals.noted():
        _check_weights_cache(config.model)
    with refusals.noted():
        _check_ranks(config)
    with refusals.noted():
        _check_tokenizer(config.model)
    with refusals.noted():
        check_tiers(config.kv_tiers)
    with refusals.noted():
        check_endpoints(config.kv_events)
    with refusals.noted():
        _check_adapters(config.lora, adapted)
    for directory in config.lora.resolver_directories:
        with refusals.noted():
            _check_resolver_directory(directory, config.lora)
    with refusals.noted():
        require_installed(config.structured_outputs.library)
    refusals.raise_noted()


def _check_adapters(config: LoRAConfig, adapted: Adapted) -> None:
    """Check all of them, up to the first that is not read in time: others may lie beside it."""
    refusals = Refusals()
    for name, path in config.modules:
        try:
            _check_adapter(name, path, config, adapted)
        except AdapterUnavailableError as error:
            refusals.note(error)
            break
        except LoraServeError as error:
            refusals.note(error)
    refusals.raise_noted()


def _check_model(config: ModelConfig, parallel: ParallelConfig) -> Adapted:
    """What adapters may change, if the model's config can be served."""
    from lora_serve.models.base import adapted_modules  # imports torch
    from lora_serve.models.choices import dtype_name, max_model_len
    from lora_serve.models.source import check_quantization, load_spec, model_path

    directory = model_path(config.model, config.revision, config.load_format, with_weights=False)
    spec = load_spec(directory, config.load_format, config.model_impl)
    refusals = Refusals()
    vocabulary = spec.vocabulary()
    with refusals.noted():
        check_quantization(directory, config.load_format, config.quantization)
    with refusals.noted():
        dtype = dtype_name(config.dtype, spec)
        vocabulary = vocabulary and replace(vocabulary, dtype=dtype)
    with refusals.noted():
        max_model_len(config.max_model_len, spec)
    with refusals.noted():
        spec = spec.divided(parallel.tensor_parallel_size, parallel.reduce)
    with refusals.noted():
        _check_dimensions(pooling_defaults(config).dimensions, spec.hidden_size)
    refusals.raise_noted()
    return adapted_modules(spec), vocabulary


def _check_draft_model(config: EngineConfig) -> None:
    draft = config.draft_model
    if draft is None:
        return
    from lora_serve.models.choices import check_draft_vocabulary, dtype_name  # imports torch
    from lora_serve.models.source import load_spec, model_path

    model, served = draft.model, config.model
    try:
        directory = model_path(model.model, model.revision, model.load_format, with_weights=False)
        spec = load_spec(directory, model.load_format, model.model_impl)
        dtype = dtype_name(model.dtype, spec)
    except ConfigError as error:
        raise ConfigError(f"--speculative-config: the draft model: {error}") from error
    _check_fits(model, spec, dtype)
    try:
        served_path = model_path(
            served.model, served.revision, served.load_format, with_weights=False
        )
        served_spec = load_spec(served_path, served.load_format, served.model_impl)
    except ConfigError:
        return  # which is told of the served model itself
    check_draft_vocabulary(model.model, spec, served_spec)
    check_same_tokens(str(directory), served.tokenizer or str(served_path))


def _check_fits(model: ModelConfig, spec: ModelSpec, dtype: str) -> None:
    """Refuse a draft model whose weights alone are more than there is memory."""
    from lora_serve.models.base import num_parameters
    from lora_serve.worker.device import open_device  # imports torch

    bits = {"float32": 32, "int8": 8, "int4": 4}.get(model.quantizes_to or dtype, 16)
    if model.load_format != RANDOM_WEIGHTS and model.quantizes_to is None:
        bits = min(bits, _FEWEST_STORED_BITS)  # codes that are stored may be kept
    least_bytes, free_bytes = (
        num_parameters(spec) * bits // 8,
        open_device(model.device).free_bytes(),
    )
    if least_bytes > free_bytes:
        raise ConfigError(
            f"--speculative-config: the weights of the draft model {model.model} take "
            f"{least_bytes:,} bytes at least, and {free_bytes:,} are free; choose a smaller one, "
            "or set quantization"
        )


def _check_ranks(config: EngineConfig) -> None:
    """Refuse ranks that this machine cannot run, and what does not go with any."""
    if config.parallel.tensor_parallel_size == 1:
        return
    from lora_serve.worker.rank_cards import check_places  # imports torch

    check_places(config)


def _check_tokenizer(config: ModelConfig) -> None:
    is_directory = (Path(config.model).expanduser() / "config.json").is_file()
    if config.tokenizer is not None:
        check_tokenizer_files(config.tokenizer, config.revision)
    elif is_directory or names_gguf(config.model):
        # Else the model is on the hub, or is refused for what it is: no second line for that.
        check_tokenizer_files(config.model, config.revision)


def _check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and dimensions > hidden_size:
        raise ConfigError(
            f"--pooler-config: dimensions {dimensions} is above {hidden_size}, the model's hidden "
            "size; lower it, or leave it out"
        )


def _check_weights_cache(config: ModelConfig) -> None:
    if config.weights_cache_path is not None:
        from lora_serve.models.kept_weights.cache import open_cache  # imports torch

        open_cache(Path(config.weights_cache_path)).close()


def _check_adapter(name: str, path: str, config: LoRAConfig, adapted: Adapted) -> None:
    """Refuse an adapter, also one whose disk does not answer.

    Raises:
        AdapterUnavailableError: reading, or downloading, took longer than its flag allows.
    """
    module = f"--lora-modules {name}={path}"
    load_limit = ("--lora-load-timeout", config.lora_load_timeout)
    try:
        found = _in_time(
            module, *load_limit, partial(find_adapter, path, config.lora_allowed_roots)
        )
        if isinstance(found, HubAdapter):
            limits = (config.lora_max_download_bytes, config.lora_hub_cache_bytes)
            download = partial(download_from_hub, found, *limits)
            found = _in_time(
                module, "--lora-download-timeout", config.lora_download_timeout, download
            )
        check = partial(
            check_adapter,
            found,
            lora_modules=adapted[0],
            max_lora_rank=config.max_lora_rank,
            vocabulary=adapted[1],
            max_vocab_bytes=config.max_lora_vocab_bytes,
            max_expert_rank=config.max_lora_expert_rank,
            allowed_roots=config.lora_allowed_roots,
        )
        _in_time(module, *load_limit, check)
    except AdapterNotFoundError as error:
        raise ConfigError(
            f"{module}: {error}; name a directory that holds {CONFIG_NAME}, or a hub id"
        ) from error


def _check_resolver_directory(path: str, config: LoRAConfig) -> None:
    """Refuse a place in which no adapter could be found: each request would say it is unknown."""
    place, directory = f"--lora-resolver dir:{path}", Path(path).expanduser()
    limit = ("--lora-load-timeout", config.lora_load_timeout)
    if not _in_time(place, *limit, directory.is_dir):
        what = "is no directory" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{place}: {directory.absolute()} {what}; make it, or mount it, before the server "
            "starts: adapters may come into it later"
        )


def _in_time(what: str, flag: str, seconds: float, work: Callable[[], Got]) -> Got:
    """What `work` returns, if it does in time; it is left alone otherwise.

    A read of a mount that hangs cannot be ended, so it has a thread that ends with the process.

    Raises:
        AdapterUnavailableError: naming the flag.
    """
    done: Future[Got] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the caller's
            done.set_exception(error)

    threading.Thread(target=run, name="startup-check", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():  # its own
            raise
        raise AdapterUnavailableError(
            f"{what} was not read within {flag} {seconds:g}; see that its disk or hub answers, or "
            "raise the limit"
        ) from None
