"""One call of a kernel as a value: what runs on the card is exactly what is compiled ahead of time.

Knows no kernel. A launch without programs is no launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Machine:
    """What launches are shaped for.

    row_elements: what a program of a kernel that takes rows by themselves works on, at least.
    """

    num_multiprocessors: int
    capability: int
    row_elements: int = 1024


A100 = Machine(num_multiprocessors=108, capability=80)
H200 = Machine(num_multiprocessors=132, capability=90)
# An interpreted operation takes the same time for a thousand elements as for one.
INTERPRETER = Machine(num_multiprocessors=1, capability=90, row_elements=1 << 16)


def machine_of(device: torch.device) -> Machine:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        num_multiprocessors=properties.multi_processor_count,
        capability=10 * properties.major + properties.minor,
    )


# Else the compiler may fuse a product and a sum in one kernel and not in another that must agree
# with it; where kernels say fma, they mean it.
FUSES = False


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: a jitted function. grid: programs along its axes; 0 of them run nothing."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int = 1


Run = Callable[[Launch], None]


def run(launch: Launch) -> None:
    if 0 in launch.grid:
        return
    launch.kernel[launch.grid](
        **launch.arguments,
        **launch.constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=FUSES,
    )
