"""Ranks on GPUs: whether there is a card for each, the card of one, and how it meets the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lora_serve.config import EngineConfig, ParallelConfig
from lora_serve.config.parallel import NCCL
from lora_serve.distributed.group import Group, exchange
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.errors import ConfigError, RankLostError
from lora_serve.ops.cpu.numa import check_cores
from lora_serve.worker.device import Device, names_gpu

_NAP_SECONDS = 0.00005  # between two looks at the card, whose next step is there already


def check_places(config: EngineConfig) -> None:
    """Refuse ranks for which there is no card each, or no core.

    Raises:
        ConfigError: with a line for each reason.
    """
    if names_gpu(config.model.device):
        check_cards(config.parallel)
    else:
        check_cores(config.parallel)


def check_cards(parallel: ParallelConfig) -> None:
    """Raise ConfigError for more ranks than cards, and for what ranks on GPUs do not go with."""
    size, num_cards = parallel.tensor_parallel_size, torch.cuda.device_count()
    flag = f"--tensor-parallel-size {size}"
    if size > num_cards:
        raise ConfigError(
            f"{flag} is above the {num_cards} GPU{'s' * (num_cards != 1)} that torch sees, one for "
            "each rank; lower it, or see CUDA_VISIBLE_DEVICES"
        )
    if parallel.tensor_parallel_backend not in ("auto", NCCL):
        raise ConfigError(
            f"--tensor-parallel-backend {parallel.tensor_parallel_backend} goes through the host, "
            "and a recorded step of a GPU cannot; leave it out, or add --device cpu"
        )
    if parallel.cpu_ranks != "none":
        raise ConfigError(
            f"--cpu-ranks {parallel.cpu_ranks} is for CPUs alone; leave it out, or add --device cpu"
        )
    if not torch.distributed.is_nccl_available():
        raise ConfigError(
            f"{flag}: torch {torch.__version__} was built without NCCL, by which ranks on GPUs "
            "meet; install torch for Linux and CUDA"
        )


def open_card(rank: int, limits: RankLimits, check: Callable[[], None]) -> Device:
    """A rank's card, as the device of the calling thread."""
    from lora_serve.worker.cuda_device import CudaDevice

    wait = partial(wait_for_ranks, check=check)
    return CudaDevice(rank, partial(wait, limit=limits.step), partial(wait, limit=limits.load))


def open_card_group(
    card: torch.device, on_hosts: Group, store_path: Path, limits: RankLimits
) -> Group:
    """The group of a rank that has opened its card. store_path: as of TorchGroup.

    Raises:
        RankLostError: a rank has ended before it was there.
    """
    from lora_serve.distributed.card_group import CardGroup, StreamGroup, open_nccl

    exchange(on_hosts, b"")  # which sees that, as NCCL would not
    rank, world_size = on_hosts.rank, on_hosts.world_size
    return CardGroup(StreamGroup(rank, world_size, store_path, limits, open_nccl), on_hosts, card)


def wait_for_ranks(
    is_done: Callable[[], bool], limit: TimeLimit, check: Callable[[], None]
) -> None:
    """Wait for a card's work, in which it meets other ranks' cards.

    check: raises when a rank has ended.

    Raises:
        RankLostError: it has not ended in time; or as `check` says.
    """
    deadline = time.monotonic() + limit.seconds
    while not is_done():
        check()
        if time.monotonic() > deadline:
            raise RankLostError(f"a rank hangs: a step has not ended in {limit}")
        time.sleep(_NAP_SECONDS)
