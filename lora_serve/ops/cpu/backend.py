"""The native CPU kernels (csrc/cpu) as `Ops`: one file beside this for each group of kernels.

The one rule: whatever the native side takes on trust (addresses, shapes, dtypes, strides) is
checked or arranged in these files, dearly where weights and plans are made, cheaply in calls. They
know nothing of how the kernels work; a number is summed in the same order on any number of threads.
"""

from __future__ import annotations

import os

import torch

from lora_serve.errors import ConfigError
from lora_serve.ops._cpu import Backend, usable_paths
from lora_serve.ops.contract import Ops, Runtime
from lora_serve.ops.cpu import plans
from lora_serve.ops.cpu.attention import CpuAttention
from lora_serve.ops.cpu.experts import CpuExperts
from lora_serve.ops.cpu.linear import CpuLinears
from lora_serve.ops.cpu.lora import CpuLoRA
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.rowwise import CpuRowwise
from lora_serve.ops.cpu.threads import pin_threads

PATH_VARIABLE = "LORA_SERVE_CPU_PATH"

# Raised whenever any path's results may change in a bit.
NUMERICS_VERSION = 3

# Those that multiply bytes faster than memory brings them.
SCREENING_PATHS = ("amx", "avx512bf16", "avx512vnni")


class CpuKernels:
    """All groups of kernels on one path.

    One thread calls at a time; but any may pack an adapter meanwhile.
    """

    def __init__(self, path: str, num_threads: int) -> None:
        self.native = Backend(path, num_threads)
        self.packing = CpuPacking(self.native)
        self._recorder = Recorder(self.native)

    def ops(self) -> Ops:
        linears = CpuLinears(self.native, self._recorder, self.packing)
        return Ops.of_one_backend(
            name="cpu",
            numerics=f"cpu-{self.native.path}-{NUMERICS_VERSION}",
            device=torch.device("cpu"),
            rowwise=CpuRowwise(self.native, self._recorder),
            linears=linears,
            experts=CpuExperts(self.native, self._recorder, linears),
            pack_quantized=linears.pack_quantized,
            pack_codes=linears.pack_codes,
            pack_screen=linears.pack_screen if self.native.path in SCREENING_PATHS else None,
            kept_packing=self.packing,
            adapters=CpuLoRA(self.native),
            attention=CpuAttention(self.native, self._recorder),
            graph_plans=plans,
            record=self._recorder.record,
            host_calls=self._recorder,
            runtime=Runtime("cpu", self.native),
            fuse_gated=linears.fuse_gated,
        )


def load(path: str | None = None, num_threads: int | None = None, pin: bool = False) -> Ops:
    """The fastest path that this machine runs, or the one named.

    Args:
        path: one of `usable_paths()`; None reads LORA_SERVE_CPU_PATH, which may be unset.
        num_threads: None for torch's own number at this moment.
        pin: give each thread a core of its own, where `pin_threads` thinks that it helps.

    Raises:
        ConfigError: naming a path that does not exist or does not run here, and those that do.
    """
    wanted = path or os.environ.get(PATH_VARIABLE) or usable_paths()[0]
    if wanted not in usable_paths():
        raise ConfigError(
            f"{PATH_VARIABLE} {wanted!r}: this machine runs {', '.join(usable_paths())}"
        )
    kernels = CpuKernels(wanted, num_threads or torch.get_num_threads())
    if pin:
        pin_threads(kernels.native.thread_ids())
    return kernels.ops()
