"""Whose KV lies where: layers of equal KV form groups of equal size, over one pool of blocks.

A block id is a page in each of the caches, of which there are as many as a group has layers: the
layer at place j of any group uses cache j. So a block may be any group's, and what copies blocks
knows no groups. A group that has fewer layers leaves the rest of its pages unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lora_serve.distributed.shares import RankPlace
from lora_serve.errors import ConfigError
from lora_serve.kv_groups import KVGroup
from lora_serve.models.base import KVSpec


@dataclass(frozen=True, slots=True)
class KVLayout:
    """groups: in the order of their first layers. cache_specs: what each cache holds of a token.

    group_of, cache_of: by layer.
    """

    groups: tuple[KVGroup, ...]
    cache_specs: tuple[KVSpec, ...]
    group_of: tuple[int, ...]
    cache_of: tuple[int, ...]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Each layer's group and cache."""
        return list(zip(self.group_of, self.cache_of, strict=True))

    def by_layer(self, caches: Sequence[Tensor]) -> list[Tensor]:
        """The cache of each layer."""
        return [caches[cache] for cache in self.cache_of]


def layout_of_rank(specs: Sequence[KVSpec], place: RankPlace) -> KVLayout:
    """The layout of what one rank keeps, of layers that have these specs as a whole."""
    return kv_layout([spec.of_rank(place) for spec in specs])


def kv_layout(specs: Sequence[KVSpec]) -> KVLayout:
    """Group the layers. A group has as many as the spec that the fewest layers share.

    Raises:
        ConfigError: when a block of one layer would have another size than one of another.
    """
    shapes = {(spec.num_kv_heads, spec.head_size) for spec in specs}
    if len(shapes) > 1:
        raise ConfigError(
            f"layers with KV heads of different numbers or sizes, {sorted(shapes)}, cannot share "
            "one KV cache; serve another model"
        )
    sharing = {spec: [i for i, other in enumerate(specs) if other == spec] for spec in specs}
    size = min(map(len, sharing.values()))
    groups = [
        (spec, layers[start : start + size])
        for spec, layers in sharing.items()
        for start in range(0, len(layers), size)
    ]
    group_of, cache_of = [0] * len(specs), [0] * len(specs)
    for group, (_, layers) in enumerate(groups):
        for place, layer in enumerate(layers):
            group_of[layer], cache_of[layer] = group, place
    return KVLayout(
        tuple(KVGroup(spec.window) for spec, _ in groups),
        (specs[0],) * size,
        tuple(group_of),
        tuple(cache_of),
    )
