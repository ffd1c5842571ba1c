"""One call of a kernel as a value: what runs on the card is exactly what is compiled ahead of time.

Knows no kernel. A launch without programs is no launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

LEAST_OVERLAPPING_CAPABILITY = 90


@dataclass(frozen=True, slots=True)
class Machine:
    """What launches are shaped for.

    shared_bytes: of a multiprocessor, for the programs that it runs at once.
    row_elements: what a program of a kernel that takes rows by themselves works on, at least.
    overlaps_launches: whether a kernel begins while the one before it ends (overlap.py).
    """

    num_multiprocessors: int
    capability: int
    shared_bytes: int
    row_elements: int = 1024
    overlaps_launches: bool = False


A100 = Machine(num_multiprocessors=108, capability=80, shared_bytes=164 << 10)
H200 = Machine(
    num_multiprocessors=132, capability=90, shared_bytes=228 << 10, overlaps_launches=True
)
# An interpreted operation takes the same time for a thousand elements as for one.
INTERPRETER = Machine(1, 90, H200.shared_bytes, row_elements=1 << 16)


def machine_of(device: torch.device) -> Machine:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return Machine(
        num_multiprocessors=properties.multi_processor_count,
        capability=capability,
        shared_bytes=properties.shared_memory_per_multiprocessor,
        overlaps_launches=capability >= LEAST_OVERLAPPING_CAPABILITY,
    )


# Else the compiler may fuse a product and a sum in one kernel and not in another that must agree
# with it; where kernels say fma, they mean it.
FUSES = False


def kernel(*unaligned: str) -> Callable[[Callable[..., None]], Any]:
    """Have Triton compile a function once for its constants and the types of its arguments.

    Left to itself it compiles again, for seconds and while requests wait, when a number is 1 or no
    multiple of 16 for the first time, or an address. So numbers are only numbers here, and
    addresses multiples of 16 but those of the arguments named.
    """

    def jit(function: Callable[..., None]) -> Any:
        numbers = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.annotation is inspect.Parameter.empty and not name.endswith("_ptr")
        ]
        jitted: Any = triton.jit(
            function, do_not_specialize=numbers, do_not_specialize_on_alignment=unaligned
        )
        jitted.unaligned = unaligned
        return jitted

    return jit


Arguments = Mapping[str, Tensor | int | float]
Constants = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: what `kernel` made. grid: programs along its axes; 0 of them run nothing."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Arguments
    constants: Constants
    num_warps: int
    num_stages: int = 1

    @property
    def options(self) -> dict[str, int | bool]:
        """What the compiler and the launch are told beside the constants."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": FUSES,
            "launch_pdl": bool(self.constants["OVERLAPS"]),
        }

    @property
    def variant(self) -> tuple[object, ...]:
        """What the compiler knows of it: launches of one variant run the same machine code."""
        arguments = (self._known(name, value) for name, value in self.arguments.items())
        constants = self.constants.items()
        return (self.kernel.__name__, *arguments, *constants, self.num_warps, self.num_stages)

    def _known(self, name: str, value: Tensor | float) -> tuple[object, ...]:
        if not isinstance(value, Tensor):
            return name, type(value), isinstance(value, int) and value >= 1 << 31
        return name, value.dtype, name in self.kernel.unaligned or value.data_ptr() % 16 == 0


Run = Callable[[Launch], None]


def run(launch: Launch) -> None:
    if 0 in launch.grid:
        return
    launch.kernel[launch.grid](**launch.arguments, **launch.constants, **launch.options)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs kernels on one machine."""

    machine: Machine
    run: Run = run
