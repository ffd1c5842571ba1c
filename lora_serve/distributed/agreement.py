"""What ranks must agree on before their first step."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.distributed.group import ROOT, Group, exchange
from lora_serve.errors import ConfigError


def require_equal(group: Group, fingerprint: bytes) -> None:
    """Refuse ranks whose weights or kernels differ from the first one's."""
    if group.world_size == 1:
        return
    fingerprints = exchange(group, fingerprint)
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[ROOT]]
    if others:
        raise ConfigError(
            f"{ranks_named(others)} other weights or kernels than rank {ROOT}; "
            "see that all read the same checkpoint with the same lora-serve"
        )


def ranks_named(ranks: Sequence[int]) -> str:
    """Say "rank 1 has", or "ranks 1, 2 have"."""
    names = ", ".join(map(str, ranks))
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


def least(group: Group, count: int) -> int:
    """The least of what the ranks have."""
    if group.world_size == 1:
        return count
    return min(map(int, exchange(group, str(count).encode())))
