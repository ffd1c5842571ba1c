"""Without a card, Triton's kernels are interpreted in this process, and in none that it starts.

That is settled when Triton is first imported, which other libraries do too: so it stands here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

if importlib.util.find_spec("triton") and not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import knobs

    del os.environ["TRITON_INTERPRET"]
    knobs.propagate_env = False
    knobs.runtime.interpret = True

    from tests.fakes import interpreted_indices, ordered_dot

    interpreted_indices.install()
    ordered_dot.install()
