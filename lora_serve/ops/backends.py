"""Which kernels this machine has, and which of them serve. Says so loudly when it is the slow ones.

The choice is the user's through `--override-op`; nothing else changes it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

import torch
import xxhash

from lora_serve.ops import Ops, override_ops
from lora_serve.ops.reference import REFERENCE

logger = logging.getLogger(__name__)


def available_ops() -> dict[str, Ops]:
    """Backends by name, fastest last: "reference" always, "cpu" where the extension was built."""
    backends = {"reference": REFERENCE}
    try:
        backends["cpu"] = importlib.import_module("lora_serve.ops.cpu").load()
    except ImportError as error:
        logger.debug("no native CPU kernels: %s", error)
    return backends


def choose_ops(overrides: Sequence[str]) -> Ops:
    """The fastest backend, with groups of kernels swapped as `--override-op` asks.

    Raises:
        ConfigError: for a group or backend that does not exist.
    """
    backends = available_ops()
    if "cpu" not in backends:
        logger.warning(
            "lora-serve was installed without its native CPU kernels; the reference kernels in "
            "plain torch serve instead, many times slower. Install a C++ compiler and reinstall."
        )
    return override_ops(backends.get("cpu", REFERENCE), overrides, backends)


def machine_numerics(ops: Ops) -> str:
    """`ops.numerics`, and what else of this machine may change a bit of the results."""
    if "reference" not in ops.numerics:
        return ops.numerics
    threads = torch.get_num_threads()
    return f"{ops.numerics},torch={torch.__version__},threads={threads},bits={_sample_bits()}"


def _sample_bits() -> str:
    """Digest of a sum of a thousand terms, which tells processors and math libraries apart."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(2, 16, 1000, generator=generator)
    bits = REFERENCE.linear(x, REFERENCE.pack_linear(weight, None)).view(torch.int32)
    return xxhash.xxh3_64_hexdigest(repr(bits.tolist()).encode())
