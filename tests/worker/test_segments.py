"""Sums in segments: the same bits at every number of ranks that divides these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule
from lora_serve.config import ParallelConfig
from lora_serve.config.parallel import NUM_SEGMENTS, Reduce
from lora_serve.distributed.group import ALONE
from lora_serve.errors import ConfigError
from lora_serve.layers import summed_linear
from lora_serve.models.base import LinearLayout
from lora_serve.models.source import load_spec
from lora_serve.ops.contract import LoRAPart
from lora_serve.ops.quantization import INT8, quantize
from lora_serve.ops.select import available_ops
from lora_serve.worker.adapter_weights import AdapterWeights
from tests.fakes.gguf_files import save_gguf
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import divided, life, whole
from tests.fakes.ranks import make_rank
from tests.fakes.tiny_models import ALL_MODELS, FOUR_KV_HEADS, save

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")

SEGMENTS: dict[str, Any] = {"reduce": Reduce("segments", NUM_SEGMENTS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[FOUR_KV_HEADS].make(), tmp_path_factory.mktemp("segments") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterCheckpoint]:
    """The first one's projections have biases, of which a sum must have each once."""
    spec = load_spec(model)
    saved = (make_peft(FOUR_KV_HEADS, seed, lora_bias=seed == 0) for seed in range(2))
    return [read_saved(each, tmp_path_factory.mktemp("adapter"), spec) for each in saved]


INT8_CODES = {"dtype": "bfloat16", "quantization": "int8"}


@pytest.mark.parametrize(
    ("settings", "sizes"), [({"dtype": "bfloat16"}, (2, 4, 8)), (INT8_CODES, (2,))], ids=str
)
def test_every_number_of_ranks_that_divides_the_segments_gives_the_same_bits(
    model: Path,
    adapters: list[AdapterCheckpoint],
    settings: dict[str, Any],
    sizes: tuple[int, ...],
) -> None:
    expected = life(whole(model, **SEGMENTS, **settings), adapters)
    for world_size in sizes:
        assert life(divided(model, world_size, **SEGMENTS, **settings), adapters) == expected


def test_segments_sum_what_whole_rows_sum(model: Path, adapters: list[AdapterCheckpoint]) -> None:
    """Up to rounding; so they have an identity of their own."""
    gathered, summed = (whole(model, **each) for each in ({}, SEGMENTS))
    one, other = (life(executor, adapters) for executor in (gathered, summed))
    assert one != other
    with_adapter = (bytearray(each[0].requests[1].pooled) for each in (one, other))
    hidden, expected = (torch.frombuffer(rows, dtype=torch.float32) for rows in with_adapter)
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-3)
    prints = [make_rank(model, ALONE, **each).load().fingerprint for each in ({}, SEGMENTS)]
    assert len(set(prints)) == 2


def test_all_reduce_has_a_segment_for_each_rank(
    model: Path, adapters: list[AdapterCheckpoint]
) -> None:
    of_two, of_four = (
        ParallelConfig(tensor_parallel_size=size, tensor_parallel_reduce="all-reduce").reduce
        for size in (2, 4)
    )
    assert (of_two.num_segments, of_four.num_segments) == (2, 4)
    expected = life(whole(model, reduce=of_two), adapters)
    assert life(divided(model, 2, reduce=of_two), adapters) == expected
    assert life(divided(model, 4, reduce=of_four), adapters) != expected, "no promise"


def test_a_file_of_codes_is_divided(tmp_path: Path) -> None:
    """Segments of it are codes, too, of 32 inputs and of 64."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    kind = replace(ALL_MODELS["llama"], options=wide)
    path = save_gguf(kind.make(), tmp_path / "m.gguf", lambda _: GgmlType.Q8_0)
    for world_size, settings in ((3, {}), (2, SEGMENTS)):
        expected = life(whole(path, **settings), [])
        assert life(divided(path, world_size, **settings), []) == expected


def test_columns_of_codes_are_the_weights_columns() -> None:
    weight = quantize(torch.randn(6, 256), INT8)
    for share in (range(128), range(96, 192), range(240, 256)):
        assert weight.has_columns(share)
        some = weight.with_columns(share)
        assert torch.equal(some.dequantized(), weight.dequantized()[:, share.start : share.stop])
    assert not weight.has_columns(range(8, 128)), "groups of 8"


@pytest.mark.parametrize(
    ("world_size", "num_segments", "message"),
    [
        (
            3,
            8,
            "segments: 3 ranks would cut some of the 8 segments of model.layers.0.self_attn.o_proj",
        ),
        (1, 200, "segments makes 200 segments of 128 inputs; choose gather"),
    ],
)
def test_segments_that_cannot_be_are_refused_in_one_line(
    model: Path, world_size: int, num_segments: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--tensor-parallel-reduce {message}"):
        divided(model, world_size, reduce=Reduce("segments", num_segments)).load()


# ── faults put in on purpose ────────────────────────────────────────────────────────────────────


def in_a_row(
    count: int, part: Callable[[int], Tensor], add: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Add from the first to the last, whatever a rank has of them."""
    total = part(0)
    for index in range(1, count):
        total = add(part(index), total)
    return total


def test_sums_in_the_order_in_which_ranks_have_them_show(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summed_linear, "sum_in_pairs", in_a_row)
    expected = life(whole(model, **SEGMENTS), [])
    assert life(divided(model, 4, **SEGMENTS), []) != expected


def test_an_adapter_of_other_inputs_shows(
    model: Path, adapters: list[AdapterCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each segment multiplies the first inputs of A."""
    part = AdapterWeights._part

    def of_the_first(
        weights: AdapterWeights, module: LoRAModule, out_start: int, linear: LinearLayout
    ) -> LoRAPart:
        if linear.segment is not None:
            linear = replace(linear, segment=range(len(linear.segment)))
        return part(weights, module, out_start, linear)

    monkeypatch.setattr(AdapterWeights, "_part", of_the_first)
    with pytest.raises(AssertionError, match="not close"):
        test_segments_sum_what_whole_rows_sum(model, adapters)
