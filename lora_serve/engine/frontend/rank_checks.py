"""What can be told of ranks without torch, which takes seconds to import.

By this machine's cores and the model's config.json; `startup_checks.py` sees all the rest.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.config.parallel import above_limit
from lora_serve.config.refusals import Refusals
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.numa import check_cores
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.regular_file import MAX_JSON_BYTES, read_regular

logger = logging.getLogger(__name__)

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's; the second in Windows' Linux
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")  # as families call it


def check_ranks(config: EngineConfig) -> None:
    """Refuse more ranks than this machine's cores or the model's heads, as far as is known yet.

    Raises:
        ConfigError: with a line for each reason.
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return
    refusals = Refusals()
    with refusals.noted():
        num_heads = _num_heads(config.model)
        if num_heads is not None and size > num_heads:
            raise above_limit(size, f"the model's {num_heads} attention heads")
    if _has_no_gpu(config.model):
        with refusals.noted():
            check_cores(config.parallel)
    refusals.raise_noted()


def warn_of_shared_cores(config: EngineConfig, num_replicas: int = 1) -> None:
    """Tell of more threads than cores, if the user has asked for them."""
    each, num_ranks = config.model.cpu_threads, config.parallel.tensor_parallel_size
    if each is None or not _has_no_gpu(config.model):
        return
    num_processes, cores = num_replicas * num_ranks, default_num_threads()
    if each * num_processes <= cores:
        return
    of_ranks = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    of_replicas = f" of {num_replicas} replicas" if num_replicas > 1 else ""
    logger.warning(
        "--cpu-threads %d%s%s: %d threads share the %d core%s that may be used, and all wait for "
        "those that have none, so answers are slow; lower it to %d, or leave it out",
        *(each, of_ranks, of_replicas, each * num_processes, cores, "s" * (cores != 1)),
        max(1, cores // num_processes),
    )


def has_gpu_driver() -> bool:
    """Whether torch may see a GPU here. Where there is no driver, it need not be asked."""
    return any(map(os.path.exists, GPU_DRIVERS))


def _has_no_gpu(model: ModelConfig) -> bool:
    """Whether it is known without torch that the model will be on the CPU."""
    return model.device == "cpu" or (model.device == "auto" and not has_gpu_driver())


def _num_heads(model: ModelConfig) -> int | None:
    """What a directory's config.json says; None where that is not known, or not yet here."""
    if not model.model:
        return None
    path = Path(model.model).expanduser() / "config.json"
    try:
        config = json.loads(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError, ConfigError):
        return None  # what is wrong with it is told when the model is looked at
    if not isinstance(config, dict):
        return None
    of_text = config.get("text_config")
    for settings in (of_text, config) if isinstance(of_text, dict) else (config,):
        for name in _NUM_HEADS:
            if type(settings.get(name)) is int:
                return int(settings[name])
    return None
