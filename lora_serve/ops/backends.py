"""Which kernels this machine has, and which of them serve. Says so loudly when it is the slow ones.

The choice is the user's through `--override-op`; nothing else changes it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence

import torch
import xxhash

from lora_serve.errors import ConfigError
from lora_serve.ops import Ops, override_ops
from lora_serve.ops.reference import REFERENCE

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def available_ops(
    device: torch.device = CPU,
    batch_invariant: bool = False,
    pin_threads: bool = False,
    overlap_launches: bool = True,
) -> dict[str, Ops]:
    """Backends for a device by name.

    On CPUs "reference" always, "cpu" where the extension was built, and "triton" where its
    interpreter runs (TRITON_INTERPRET=1), for tests; on other devices "triton".
    """
    if device.type != "cpu":
        return {"triton": _load_triton(device, batch_invariant, overlap_launches)}
    backends = {"reference": REFERENCE}
    try:
        native = importlib.import_module("lora_serve.ops.cpu.backend")
        backends["cpu"] = native.load(pin=pin_threads)
    except ImportError as error:
        logger.debug("no native CPU kernels: %s", error)
    if os.environ.get("TRITON_INTERPRET") == "1":
        backends["triton"] = _load_triton(device, batch_invariant, overlap_launches)
    return backends


def _load_triton(device: torch.device, batch_invariant: bool, overlap_launches: bool) -> Ops:
    try:
        module = importlib.import_module("lora_serve.ops.triton.backend")
    except ImportError as error:
        raise ConfigError(
            f"--device {device}: its kernels need Triton, which cannot be imported ({error}); "
            "pip install 'lora-serve[cuda]'"
        ) from error
    ops: Ops = module.load(
        device, batch_invariant=batch_invariant, overlap_launches=overlap_launches
    )
    return ops


def choose_ops(
    overrides: Sequence[str],
    device: torch.device,
    batch_invariant: bool = False,
    pin_threads: bool = False,
    overlap_launches: bool = True,
) -> Ops:
    """The fastest backend of a device, with groups of kernels swapped as `--override-op` asks.

    Raises:
        ConfigError: for a group or backend that does not exist, or cannot be loaded.
    """
    backends = available_ops(device, batch_invariant, pin_threads, overlap_launches)
    if device.type != "cpu":
        return override_ops(backends["triton"], overrides, backends)
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
