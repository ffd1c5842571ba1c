"""The greedy token by screening is the one that all logits give, or none is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_serve.bitmask import bitmask_of
from lora_serve.ops._cpu import Backend, PackedScreen, usable_paths
from lora_serve.ops.cpu.dtypes import DTYPE_CODES
from lora_serve.ops.cpu.linear import CpuLinears
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.weights import PackedLinear, pack_linear
from lora_serve.sampling.specification.adjust import allowed_tokens

UNDECIDED = -1


@dataclass(frozen=True)
class Head:
    """An LM head on one path."""

    native: Backend
    packed: PackedLinear
    screen: PackedScreen | None

    @classmethod
    def of(cls, path: str, weight: Tensor) -> Head:
        native = Backend(path, 2)
        packing = CpuPacking(native)
        return cls(native, pack_linear(packing, weight, None), packing.screen(weight))

    def greedy(self, x: Tensor, bitmasks: Sequence[bytes | None] = ()) -> list[int]:
        assert self.screen is not None
        address, code = self.packed.address, self.packed.code
        return self.native.screened_tokens(
            code, x.data_ptr(), address, self.screen, len(x), bitmasks, ()
        )

    def by_all_logits(self, x: Tensor, bitmasks: Sequence[bytes | None] = ()) -> list[int]:
        y = torch.empty(len(x), self.packed.out_features, dtype=x.dtype)
        code, sizes = DTYPE_CODES[x.dtype], (len(x), x.shape[1], y.shape[1])
        self.native.linear(code, x.data_ptr(), self.packed.address, 0, y.data_ptr(), *sizes)
        logits = y.to(torch.float32).numpy()
        for row, bitmask in zip(logits, bitmasks, strict=False):
            if bitmask is not None:
                row[~allowed_tokens(bitmask, len(row))] = -np.inf
        return [int(token) for token in np.argmax(logits, axis=1)]


@pytest.fixture(params=usable_paths())
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("vocab_size", "width", "rows"), [(4000, 128, 7), (3999, 96, 1), (2500, 300, 64), (17, 16, 3)]
)
def test_random_heads(
    path: str, dtype: torch.dtype, vocab_size: int, width: int, rows: int
) -> None:
    head = Head.of(path, random(vocab_size, width, dtype=dtype, seed=1))
    x = random(rows, width, dtype=dtype, seed=2)
    tokens = head.greedy(x)
    for token, expected in zip(tokens, head.by_all_logits(x), strict=True):
        assert token in (expected, UNDECIDED)
    if vocab_size > 1000:
        assert UNDECIDED not in tokens


def test_a_row_is_decided_as_if_it_were_alone(path: str, dtype: torch.dtype) -> None:
    head = Head.of(path, random(4000, 128, dtype=dtype, seed=3))
    x = random(9, 128, dtype=dtype, seed=4)
    assert head.greedy(x) == [head.greedy(x[row : row + 1])[0] for row in range(len(x))]


def test_the_first_of_equals_wins(path: str, dtype: torch.dtype) -> None:
    weight = random(4000, 128, dtype=dtype, seed=5)
    x = random(1, 128, dtype=dtype, seed=6)
    weight[70] = weight[2000] = weight[3999] = 2 * x[0]
    assert Head.of(path, weight).greedy(x) == [70]


def test_the_first_of_those_that_round_to_the_largest_wins(path: str) -> None:
    """The larger sum comes later, larger by 1; at this size bfloat16 numbers are 64 apart."""
    weight = random(4000, 128, dtype=torch.bfloat16, seed=7) / 64
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    weight[70] = weight[2000] = 127.0
    weight[70, 5] = 126.0
    head = Head.of(path, weight)
    assert head.by_all_logits(x) == [70]
    assert head.greedy(x) == [70]


def test_a_likelier_token_whose_codes_say_less(path: str, dtype: torch.dtype) -> None:
    """Codes cut 10.4375 to 10, and raise 10.5625 to 11: by them, the second row is larger."""
    weight = torch.zeros(4000, 128, dtype=dtype)
    weight[:, 0] = 127.0  # so that a step is 1
    weight[3000, 1:] = 10.4375
    weight[500, 1:65], weight[500, 65:] = 10.5625, 10.0
    x = torch.ones(1, 128, dtype=dtype)
    assert Head.of(path, weight).greedy(x) == [3000]


def test_a_likelier_token_of_which_the_state_in_bytes_says_less(
    path: str, dtype: torch.dtype
) -> None:
    weight = torch.zeros(4000, 129, dtype=dtype)
    weight[3000, 1:65] = 1.0
    weight[500, 65:128] = 1.0
    x = torch.full((1, 129), 10.4375, dtype=dtype)  # 10 in bytes
    x[0, 0], x[0, 65:128] = 127.0, 10.5625  # 11
    head = Head.of(path, weight)
    assert head.by_all_logits(x) == [3000]
    assert head.greedy(x) == [3000]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_states_that_are_not_screened(path: str, value: float) -> None:
    head = Head.of(path, random(4000, 128, dtype=torch.bfloat16, seed=8))
    x = random(3, 128, dtype=torch.bfloat16, seed=9)
    x[1, 40] = value
    tokens = head.greedy(x)
    assert tokens[1] == UNDECIDED
    assert [tokens[0], tokens[2]] == head.by_all_logits(x[::2].contiguous())


def test_logits_beyond_float16_are_not_screened(path: str) -> None:
    head = Head.of(path, random(4000, 128, dtype=torch.float16, seed=8) * 64)
    assert head.greedy(random(1, 128, dtype=torch.float16, seed=9) * 512) == [UNDECIDED]


def test_a_state_of_zeros_leaves_all_in_question(path: str, dtype: torch.dtype) -> None:
    head = Head.of(path, random(4000, 128, dtype=dtype, seed=10))
    assert head.greedy(torch.zeros(1, 128, dtype=dtype)) == [UNDECIDED]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_have_no_screen(path: str, value: float) -> None:
    weight = random(100, 64, dtype=torch.bfloat16, seed=11)
    weight[50, 3] = value
    assert CpuPacking(Backend(path, 1)).screen(weight) is None


def mask(num_allowed: int, vocab_size: int, seed: int) -> bytes:
    order = np.random.default_rng(seed).permutation(vocab_size)
    return bitmask_of([int(token) for token in order[:num_allowed]], vocab_size)


@pytest.mark.parametrize("num_allowed", [1, 5, 200, 2000, 3999])
def test_of_the_tokens_that_a_mask_allows_the_most_likely_is_found(
    path: str, dtype: torch.dtype, num_allowed: int
) -> None:
    head = Head.of(path, random(3999, 96, dtype=dtype, seed=12))
    x = random(6, 96, dtype=dtype, seed=13)
    masks = [mask(num_allowed, 3999, seed) for seed in range(6)]
    assert head.greedy(x, masks) == head.by_all_logits(x, masks)


def test_rows_of_all_kinds_of_masks_are_decided_side_by_side(path: str, dtype: torch.dtype) -> None:
    head = Head.of(path, random(3999, 96, dtype=dtype, seed=14))
    x = random(4, 96, dtype=dtype, seed=15)
    masks = [None, mask(3, 3999, 1), mask(3000, 3999, 2), bitmask_of([1, 2, 3], 9)]
    tokens = head.greedy(x, masks)
    assert tokens == head.by_all_logits(x, masks)
    assert tokens == [head.greedy(x[i : i + 1], [masks[i]])[0] for i in range(4)]


def test_what_is_not_allowed_neither_wins_nor_leaves_the_others_in_question(
    path: str, dtype: torch.dtype
) -> None:
    """A hundred times as likely, and in the panels of those that are allowed."""
    weight = random(4000, 128, dtype=dtype, seed=16)
    x = random(1, 128, dtype=dtype, seed=17)
    weight[::3] = 100 * x[0]
    allowed = [token for token in range(4000) if token % 3]
    head = Head.of(path, weight)
    masks = [bitmask_of(allowed, 4000)]
    assert head.greedy(x, masks) == head.by_all_logits(x, masks)


def test_the_first_of_equals_that_are_allowed_wins(path: str, dtype: torch.dtype) -> None:
    weight = random(4000, 128, dtype=dtype, seed=5)
    x = random(1, 128, dtype=dtype, seed=6)
    weight[70] = weight[2000] = weight[3999] = 2 * x[0]
    head = Head.of(path, weight)
    all_but_70 = bitmask_of([token for token in range(4000) if token != 70], 4000)
    assert head.greedy(x, [all_but_70]) == [2000]
    assert head.greedy(x, [bitmask_of([3999, 2000, 5], 4000)]) == [2000]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_allowed", [3, 3000])
def test_states_that_are_not_finite_stay_in_question_under_a_mask(
    path: str, value: float, num_allowed: int
) -> None:
    head = Head.of(path, random(4000, 128, dtype=torch.bfloat16, seed=8))
    x = random(1, 128, dtype=torch.bfloat16, seed=9)
    x[0, 40] = value
    assert head.greedy(x, [mask(num_allowed, 4000, 1)]) == [UNDECIDED]


def test_a_mask_that_allows_no_token_of_the_model_decides_nothing(path: str) -> None:
    head = Head.of(path, random(4000, 128, dtype=torch.bfloat16, seed=8))
    x = random(1, 128, dtype=torch.bfloat16, seed=9)
    assert head.greedy(x, [b""]) == [UNDECIDED]


@pytest.mark.parametrize("vocab_size", [17, 32, 63, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_single_outputs_are_those_of_the_linear_layer(
    path: str, vocab_size: int, dtype: torch.dtype
) -> None:
    weight = random(vocab_size, 48, dtype=dtype, seed=1)
    x = random(vocab_size, 48, dtype=dtype, seed=2)
    native = Backend(path, 1)
    linears = CpuLinears(native, Recorder(native), CpuPacking(native))
    packed = linears.pack_linear(weight, None)
    screen = linears.pack_screen(weight, packed)
    assert screen is not None
    tokens = list(range(vocab_size))
    assert screen.outputs(x, tokens) == linears.linear(x, packed).diagonal().tolist()
