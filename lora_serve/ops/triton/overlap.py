"""Kernels that begin while the one before them ends (programmatic dependent launch, sm_90 on).

Between two kernels of a stream a card drains, launches and fills. A kernel that is launched so may
begin once every program of the kernel before has let it; what it does until it waits costs nothing.
No bit depends on it, because kernels keep to three rules:

1. Every program waits before it writes anything: torch gives memory to a kernel's outputs that the
   kernel before it may still read.
2. Before it waits, it reads only what no kernel writes while steps run: weights, rotary tables,
   adapters and their tables, which are complete before a step that names them is launched; and
   plans, positions and slots, which copies fill. A copy begins when all kernels before it have
   ended, and what comes after begins when the copy has. So no kernel may be called right
   behind another that makes such a thing.
3. Every program waits, those without work too, and lets the next kernel begin only then. So when
   a kernel begins, all but the one right before it have ended; and its end means the end of all
   before it, which is all that a copy, an event, or a kernel that knows nothing of this, such as
   torch's and cuBLAS's, asks for.

`python -m benchmarks.gpu.triton_resources` reads from the machine code whether compiled kernels do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier_kernels(OVERLAPS: tl.constexpr):
    """Until all have ended. Said again in a loop, it returns at once.

    The next kernel's programs then get what room there is beside this one's, all of which run.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
