"""Triton's kernels are interpreted here without a card, but in no process that this one starts.

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

    from tests.fakes import interpreted_calls, interpreted_indices, ordered_dot

    interpreted_indices.install()
    interpreted_calls.install()
    ordered_dot.install()
