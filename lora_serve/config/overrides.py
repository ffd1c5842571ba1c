"""What `--override-op` may name: a mistake in it is told before anything slow is imported."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.config.refusals import Refusals
from lora_serve.errors import ConfigError

# Methods of RowwiseKernels (lora_serve/ops/contract/rowwise.py).
ROWWISE_OPS = (
    *("embed", "rms_norm", "add_rms_norm", "layer_norm", "add", "scale"),
    *("silu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "soft_cap"),
)
ALL_OPS = "all"
OPS = (*ROWWISE_OPS, "linear", "lora", "paged_attention", "sampling", ALL_OPS)
REFERENCE = "reference"
BACKENDS = ("cpu", REFERENCE, "triton")


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse ops and backends that there are nowhere; some are on some machines only.

    Raises:
        ConfigError: with a line for each.
    """
    refusals = Refusals()
    for override in overrides:
        with refusals.noted():
            overridden_op(override)
            backend = backend_of(override)
            if backend not in BACKENDS:
                raise ConfigError(
                    f"--override-op {override}: unknown backend {backend!r}; write OP=BACKEND with "
                    f"one of {', '.join(BACKENDS)}"
                )
    refusals.raise_noted()


def overridden_op(override: str) -> str:
    """The op that OP=BACKEND is about.

    Raises:
        ConfigError: naming the op that does not exist, and those that do.
    """
    op = override.partition("=")[0]
    if op not in OPS:
        raise ConfigError(
            f"--override-op {override}: unknown op {op!r}; choose one of {', '.join(OPS)}"
        )
    return op


def backend_of(override: str) -> str:
    return override.partition("=")[2]


def refuse_reference_sums(num_ranks: int) -> ConfigError:
    """Why ranks cannot have the reference kernels."""
    return ConfigError(
        f"--tensor-parallel-size {num_ranks}: the reference kernels sum in torch's order, which "
        "may change with the size of a layer; leave out --override-op"
    )
