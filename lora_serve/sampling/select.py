"""Which sampler goes with which kernels. The one table that a new sampler is named in."""

from __future__ import annotations

import importlib

from lora_serve.ops.contract import Ops
from lora_serve.sampling.contract import Sampler
from lora_serve.sampling.logprobs_mode import RAW_LOGPROBS, LogprobsMode

# Modules by the backend that `Ops.runtime` names; each has load(launcher, mode) -> Sampler.
_MODULES = {
    "reference": "lora_serve.sampling.specification.sampler",
    "cpu": "lora_serve.sampling.native",
    "triton": "lora_serve.sampling.triton.sampler",
}


def select_sampler(ops: Ops, mode: LogprobsMode = RAW_LOGPROBS) -> Sampler:
    """The sampler that `--override-op sampling=BACKEND` names, or else that of the backend."""
    module = importlib.import_module(_MODULES[ops.runtime.backend])
    sampler: Sampler = module.load(ops.runtime.launcher, mode)
    return sampler
