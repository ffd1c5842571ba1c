from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.ops.select import available_ops, choose_ops
from lora_serve.step import KVLoad
from lora_serve.worker.kv_transfer import KVTransfer, layout_fingerprint

BACKENDS = pytest.mark.parametrize("backend", available_ops())


def random_caches(backend: str, num_layers: int = 3, num_blocks: int = 8) -> list[Tensor]:
    ops = choose_ops((f"all={backend}",), torch.device("cpu"))
    caches = [
        ops.attention.new_kv_cache(num_blocks, 16, 2, 32, torch.bfloat16) for _ in range(num_layers)
    ]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    return caches


@BACKENDS
def test_what_was_gathered_from_one_pool_is_scattered_into_another(backend: str) -> None:
    source, target = random_caches(backend), random_caches(backend)
    before = [cache.clone() for cache in target]
    transfer = KVTransfer(source)
    blobs = transfer.gather((5, 2)).rows()
    assert [len(blob) for blob in blobs] == [transfer.block_bytes] * 2
    KVTransfer(target).scatter([KVLoad(0, blobs[0]), KVLoad(7, memoryview(blobs[1]))])
    for ours, theirs, old in zip(target, source, before, strict=True):
        assert torch.equal(ours[0], theirs[5])
        assert torch.equal(ours[7], theirs[2])
        assert torch.equal(ours[1:7], old[1:7])


def test_gathered_bytes_stay_as_they_were_when_the_block_is_written_again() -> None:
    caches = random_caches("reference")
    transfer = KVTransfer(caches)
    (blob,) = transfer.gather((1,)).rows()
    for cache in caches:
        cache.zero_()
    transfer.scatter([KVLoad(3, blob)])
    assert all(cache[3].any() and not cache[1].any() for cache in caches)


def test_nothing_to_move_costs_nothing_and_touches_nothing() -> None:
    caches = random_caches("reference")
    before = [cache.clone() for cache in caches]
    transfer = KVTransfer(caches)
    assert transfer.gather(()).rows() == ()
    transfer.scatter(())
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))


def test_a_load_of_another_size_is_a_bug() -> None:
    transfer = KVTransfer(random_caches("reference"))
    with pytest.raises(AssertionError, match="another size"):
        transfer.scatter([KVLoad(0, b"too short")])


def test_the_layouts_fingerprint_knows_shape_dtype_layers_and_kernels() -> None:
    caches = random_caches("reference")
    prints = {
        layout_fingerprint(caches, "reference"),
        layout_fingerprint(caches, "other kernels"),
        layout_fingerprint(caches[:2], "reference"),
        layout_fingerprint([cache.float() for cache in caches], "reference"),
        layout_fingerprint([cache[:, :1] for cache in caches], "reference"),
    }
    assert len(prints) == 5
    fewer_blocks = [cache[:4] for cache in caches]
    assert layout_fingerprint(fewer_blocks, "reference") in prints
