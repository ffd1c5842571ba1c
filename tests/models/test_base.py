from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lora_serve.ops.contract import Ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from tests.fakes.asked import sampling, scoring
from tests.fakes.bare_model import SAMPLE, BareModel, Prompt
from tests.fakes.tiny_models import MIXTURES, SMALL_MODELS, TINY_MODELS, VOCAB_SIZE

FAMILIES = pytest.mark.parametrize("family", TINY_MODELS)
BACKENDS = pytest.mark.parametrize("ops", available_ops().values(), ids=lambda ops: ops.name)
RECORDING_BACKENDS = pytest.mark.parametrize(
    "ops", [ops for ops in available_ops().values() if ops.record], ids=lambda ops: ops.name
)
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)


def is_quick_elsewhere(ops: Ops, dtype: torch.dtype) -> bool:
    return ops.name == REFERENCE.name and dtype != torch.bfloat16


# Kernels know no family: other facts of one data flow are tried in one type.
# So are the others on the reference, but for slow runs: its types are torch's.
FAMILIES_IN_DTYPES = pytest.mark.parametrize(
    ("ops", "family", "dtype"),
    [
        pytest.param(
            ops,
            family,
            dtype,
            id=f"{ops.name}-{family}-{dtype}",
            marks=pytest.mark.slow if is_quick_elsewhere(ops, dtype) else (),
        )
        for ops in available_ops().values()
        for family in TINY_MODELS
        for dtype in ((torch.bfloat16,) if family in SMALL_MODELS else ALL_DTYPES)
    ],
)

Build = Callable[[str, Ops, torch.dtype], BareModel]


@pytest.fixture
def build(directories: dict[str, Path]) -> Build:
    return lambda family, ops, dtype: BareModel(directories[family], ops, dtype)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


class Theirs:
    """What transformers makes of a family's model, computed once for all backends."""

    def __init__(self, models: dict[str, PreTrainedModel], directories: dict[str, Path]) -> None:
        self._models, self._directories = models, directories
        self.logits = cache(self._logits)
        self.in_bfloat16 = cache(self._in_bfloat16)
        self.greedy = cache(self._greedy)

    def _logits(self, family: str) -> Tensor:
        return logits_of(self._models[family])

    def _in_bfloat16(self, family: str) -> tuple[Tensor, Tensor]:
        """The truth, which is the same bfloat16 weights computed with in float32, and theirs."""
        directory = self._directories[family]
        rounded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        exact.load_state_dict(rounded.state_dict())
        return logits_of(exact), logits_of(rounded)

    def _greedy(self, family: str) -> list[int]:
        given = torch.tensor([tokens(30, seed=1)])
        (found,) = self._models[family].generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=12
        )
        return found.tolist()


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens(90)])).logits[0].float()


@pytest.fixture(scope="module")
def theirs(tiny_models: dict[str, PreTrainedModel], directories: dict[str, Path]) -> Theirs:
    return Theirs(tiny_models, directories)


@FAMILIES
@BACKENDS
def test_logits_are_those_of_transformers(
    build: Build, theirs: Theirs, family: str, ops: Ops
) -> None:
    got = Prompt(tokens(90), range(9, 3, -1)).alone(build(family, ops, torch.float32))
    torch.testing.assert_close(got, theirs.logits(family), rtol=1e-4, atol=1e-4)


@FAMILIES
@BACKENDS
def test_bfloat16_logits_are_as_near_the_truth_as_those_of_transformers(
    build: Build, theirs: Theirs, family: str, ops: Ops
) -> None:
    """The mean row's error counts, and that of the middle row where there are experts.

    A token that stands between two experts takes another one in another rounding, theirs as ours,
    and its row is far off.
    """
    truth, rounded = theirs.in_bfloat16(family)
    got = Prompt(tokens(90), range(9, 3, -1)).alone(build(family, ops, torch.bfloat16)).float()
    of_rows = torch.median if family in MIXTURES else torch.mean
    ours, their_error = (of_rows((logits - truth).abs().mean(-1)) for logits in (got, rounded))
    assert ours < 1.2 * their_error


@FAMILIES
@BACKENDS
def test_greedy_tokens_are_those_of_transformers(
    build: Build, theirs: Theirs, family: str, ops: Ops
) -> None:
    expected = theirs.greedy(family)
    prompt = tokens(30, seed=1)
    model = build(family, ops, torch.float32)
    request = Prompt(prompt, range(5))
    logits = model.step([request.chunk(0, len(prompt))])[0]
    while len(request.token_ids) < len(expected):
        request.token_ids.append(int(logits[-1].argmax()))
        end = len(request.token_ids)
        logits = model.step([request.chunk(end - 1, end)])[0]
    assert request.token_ids == expected


@FAMILIES_IN_DTYPES
def test_chunks_prefixes_and_decode_give_the_bits_of_one_cold_prefill(
    build: Build, family: str, ops: Ops, dtype: torch.dtype
) -> None:
    model = build(family, ops, dtype)
    prompt = Prompt(tokens(53), [7, 3, 30, 2])
    whole = prompt.alone(model)
    assert torch.isfinite(whole).all()
    for chunk in (1, 7, 16):
        assert torch.equal(prompt.alone(model, chunk), whole), f"chunks of {chunk}"
    sharer = Prompt(prompt.token_ids, [7, 3, 11, 12])  # has the first two blocks from the cache
    assert torch.equal(model.step([sharer.chunk(32, 53)])[0], whole[32:])


@BACKENDS
@DTYPES
def test_a_long_prompt_has_the_same_bits_in_any_chunks(
    build: Build, ops: Ops, dtype: torch.dtype
) -> None:
    """Longer than what a kernel walks at once."""
    model = build("qwen2", ops, dtype)
    prompt = Prompt(tokens(600), range(40, 2, -1))
    whole = prompt.alone(model)
    for chunk in (100, 256, 599):
        assert torch.equal(prompt.alone(model, chunk), whole), f"chunks of {chunk}"


@FAMILIES_IN_DTYPES
def test_other_requests_in_the_batch_change_no_bit(
    build: Build, family: str, ops: Ops, dtype: torch.dtype
) -> None:
    model = build(family, ops, dtype)
    prompts = [
        Prompt(tokens(length, seed=length), range(10 * i, 10 * i + 8))
        for i, length in enumerate((40, 3, 100, 21, 1))
    ]
    alone = [prompt.alone(model) for prompt in prompts]
    model.poison()
    model.step([prompts[0].chunk(0, 39), prompts[2].chunk(0, 50)])
    mixed = model.step(
        [
            prompts[2].chunk(50, 100),
            prompts[1].chunk(0, 3),
            prompts[0].chunk(39, 40),
            prompts[4].chunk(0, 1),
            prompts[3].chunk(0, 21),
        ]
    )
    assert torch.equal(mixed[0], alone[2][50:])
    assert torch.equal(mixed[1], alone[1])
    assert torch.equal(mixed[2], alone[0][39:])
    assert torch.equal(mixed[3], alone[4])
    assert torch.equal(mixed[4], alone[3])


@FAMILIES_IN_DTYPES
def test_rows_that_are_not_asked_for_change_no_bit_of_the_others(
    build: Build, family: str, ops: Ops, dtype: torch.dtype
) -> None:
    """The last layer computes only the rows that are asked for, and the KV of all."""
    model = build(family, ops, dtype)
    silent, drawing, scored = (
        Prompt(tokens(length, seed=length), range(10 * i, 10 * i + 8))
        for i, length in enumerate((70, 33, 20))
    )
    alone = {prompt: prompt.alone(model) for prompt in (silent, drawing, scored)}
    model.poison()
    of_none, of_last, of_all = model.asked_logits(
        [
            silent.chunk(0, 60),
            replace(drawing.chunk(0, 33), asked=sampling(SAMPLE)),
            replace(scored.chunk(0, 20), asked=scoring(scored.token_ids)),
        ]
    )
    assert len(of_none) == 0
    assert torch.equal(of_last, alone[drawing][-1:])
    assert torch.equal(of_all, alone[scored])
    assert torch.equal(model.step([silent.chunk(60, 70)])[0], alone[silent][60:])
    model.poison()
    model.asked_logits([silent.chunk(0, 60)])  # not one row is asked for
    assert torch.equal(model.step([silent.chunk(60, 70)])[0], alone[silent][60:])


@FAMILIES
@RECORDING_BACKENDS
def test_a_decode_step_can_be_recorded(build: Build, family: str, ops: Ops) -> None:
    """Else steps run kernel by kernel, and what Python costs shows."""
    assert ops.record is not None
    model = build(family, ops, torch.bfloat16)
    prompt = Prompt(tokens(30), range(2))
    model.step([prompt.chunk(0, 29)])
    rows = model.builder.lay_out([prompt.chunk(29, 30)], model.adapters.__getitem__)
    batch = replace_fields(model.builder.to_device(rows), outputs=None)
    with torch.inference_mode():
        expected = model.model.forward(batch, model.kv_caches).clone()
        recorded = ops.record(lambda: model.model.forward(batch, model.kv_caches))
        recorded.replay()
    assert torch.equal(recorded.output, expected)
