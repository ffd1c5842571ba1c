from __future__ import annotations

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.kv_groups import KVGroup
from lora_serve.models.base import KVSpec
from lora_serve.worker.kv_layout import kv_layout
from lora_serve.worker.kv_transfer import layout_fingerprint

FULL, NARROW, WIDE = (KVSpec(2, 32, window) for window in (None, 16, 64))


@pytest.mark.parametrize("spec", [FULL, NARROW])
def test_layers_of_one_kind_are_one_group_with_a_cache_each(spec: KVSpec) -> None:
    layout = kv_layout([spec] * 5)
    assert layout.groups == (KVGroup(spec.window),)
    assert layout.places == [(0, layer) for layer in range(5)]
    assert len(layout.cache_specs) == 5


def test_every_other_layer_makes_two_groups_over_the_same_caches() -> None:
    layout = kv_layout([NARROW, FULL] * 3)
    assert layout.groups == (KVGroup(16), KVGroup())
    assert layout.places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert len(layout.cache_specs) == 3


def test_groups_are_as_large_as_the_rarest_kind_and_the_last_may_have_room() -> None:
    layout = kv_layout([*([NARROW] * 5), FULL, *([NARROW] * 5), FULL])
    assert layout.groups == (*[KVGroup(16)] * 5, KVGroup())
    assert len(layout.cache_specs) == 2
    assert len(set(layout.places)) == 12  # no two layers write the same page
    with_padding = kv_layout([NARROW, NARROW, NARROW, FULL, FULL])
    assert with_padding.places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]


def test_each_layer_gets_the_cache_of_its_place() -> None:
    caches = [torch.zeros(1), torch.ones(1)]
    by_layer = kv_layout([WIDE, NARROW, WIDE, NARROW]).by_layer(caches)
    assert [int(cache) for cache in by_layer] == [0, 0, 1, 1]


def test_layers_whose_blocks_differ_in_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"KV heads of different numbers or sizes"):
        kv_layout([FULL, KVSpec(4, 32, None)])


def test_the_fingerprint_of_records_says_which_layer_lies_where() -> None:
    caches = [torch.zeros(4, 2, 6, 8)] * 2
    orders = [[NARROW, FULL] * 2, [NARROW, NARROW, FULL, FULL], [FULL, FULL, NARROW, NARROW]]
    prints = {layout_fingerprint(caches, "k", kv_layout(specs).places) for specs in orders}
    assert len(prints) == 2  # which of the kinds has the window changes no byte
    one_group = kv_layout([FULL, FULL])
    assert layout_fingerprint(caches, "k", one_group.places) == layout_fingerprint(caches, "k")
    of_a_rank = [cache[:, :, :2] for cache in caches]
    assert layout_fingerprint(of_a_rank, "k", (), 6) == layout_fingerprint(caches, "k")
