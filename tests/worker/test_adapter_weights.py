from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.identity import BASE_MODEL
from lora_serve.models.source import load_spec
from lora_serve.ops.contract import Ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.device import CpuDevice
from tests.fakes.asked import sampling
from tests.fakes.bare_model import SAMPLE, BareModel, Prompt
from tests.fakes.device import RecordingDevice
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import SMALL_MODELS, TINY_MODELS, VOCAB_SIZE

BACKENDS = pytest.mark.parametrize("ops", available_ops().values(), ids=lambda ops: ops.name)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "a few projections": {"r": 4, "target_modules": ["q_proj", "up_proj", "down_proj"]},
    "rank-stabilised": {"use_rslora": True, "r": 5, "lora_alpha": 3},
    "patterns": {
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.gate_proj": 16},
        "alpha_pattern": {"v_proj": 40},
    },
}
TOKENS = [(7 * i) % VOCAB_SIZE for i in range(60)]


@BACKENDS
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, id=f"{family}-{name}")
        for family in TINY_MODELS
        for name, settings in ADAPTERS.items()
        if family not in SMALL_MODELS or name == "all projections"
    ],
)
def test_logits_are_those_of_peft(
    directories: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, Any], ops: Ops
) -> None:
    peft = make_peft(family, seed=1, **settings)
    model = BareModel(directories[family], ops, torch.float32)
    adapter = model.add_adapter(read_saved(peft, tmp_path, model.spec))
    with torch.no_grad():
        expected = peft(torch.tensor([TOKENS])).logits[0]
        base = peft.get_base_model()
        peft.disable_adapter_layers()
        without = base(torch.tensor([TOKENS])).logits[0]
    assert (expected - without).abs().max() > 0.1
    got = Prompt(TOKENS, range(4), adapter).alone(model)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_adapters_in_the_batch_change_no_bit(
    directories: dict[str, Path], tmp_path: Path, ops: Ops, dtype: torch.dtype
) -> None:
    model = BareModel(directories["qwen2"], ops, dtype)
    adapters = [
        model.add_adapter(
            read_saved(make_peft("qwen2", seed, r=rank), tmp_path / str(seed), model.spec)
        )
        for seed, rank in ((1, 8), (2, 13))
    ]
    a, b = adapters
    prompts = [
        Prompt(TOKENS[i:], range(10 * i, 10 * i + 5), adapter)
        for i, adapter in enumerate((a, BASE_MODEL, b, a, b))
    ]
    alone = [prompt.alone(model) for prompt in prompts]
    assert not torch.equal(alone[0][1:], alone[1])
    model.poison()
    model.step([prompts[0].chunk(0, 50), prompts[4].chunk(0, 17)])
    chunks = [(50, 60), (0, 59), (0, 58), (0, 57), (17, 56)]
    mixed = model.step([p.chunk(*chunk) for p, chunk in zip(prompts, chunks, strict=True)])
    for got, expected, (start, _) in zip(mixed, alone, chunks, strict=True):
        assert torch.equal(got, expected[start:])
    model.poison()
    model.step([prompts[0].chunk(0, 50), prompts[4].chunk(0, 17)])
    asking = [p.chunk(*chunk) for p, chunk in zip(prompts, chunks, strict=True)]
    asking[1:4] = [replace(chunk, asked=sampling(SAMPLE)) for chunk in asking[1:4]]
    nothing, *sampled, also_nothing = model.asked_logits(asking)
    assert len(nothing) == len(also_nothing) == 0
    for got, expected in zip(sampled, alone[1:4], strict=True):
        assert torch.equal(got, expected[-1:])


def checkpoint(digest: bytes) -> AdapterCheckpoint:
    """An adapter of rank 1 on one projection of the tiny models."""
    a = RawTensor("F32", (1, 96), memoryview(bytes(4 * 96)))
    b = RawTensor("F16", (64, 1), memoryview(bytes(2 * 64)))
    module = LoRAModule("model.layers.1.mlp.down_proj", 1, 1.0, a, b)
    return AdapterCheckpoint("/adapters/x", digest, 1, 512, "", (module,))


@pytest.fixture
def slots(directories: dict[str, Path]) -> AdapterWeights:
    linears = load_spec(directories["qwen2"]).linears()
    return AdapterWeights(linears, REFERENCE, CpuDevice(), torch.bfloat16)


def test_prepared_weights_serve_from_the_step_that_adds_them(slots: AdapterWeights) -> None:
    slots.prepare(checkpoint(b"one"))
    with pytest.raises(KeyError):
        slots[b"one"]
    slots.change((), (b"one",))
    assert slots[b"one"] is not None
    slots.change((b"one",), ())
    with pytest.raises(KeyError):
        slots[b"one"]


def test_loads_go_beside_the_steps_and_dropped_weights_are_handed_over(
    directories: dict[str, Path],
) -> None:
    device = RecordingDevice()
    linears = load_spec(directories["qwen2"]).linears()
    slots = AdapterWeights(linears, REFERENCE, device, torch.bfloat16)
    slots.prepare(checkpoint(b"one"))
    slots.change((), (b"one",))
    assert device.num_loads == 1
    weights = slots[b"one"]
    (dropped,) = slots.change((b"one",), ())
    assert dropped.packed is weights


def test_weights_prepared_again_can_be_dropped_and_added_in_one_step(slots: AdapterWeights) -> None:
    slots.prepare(checkpoint(b"one"))
    slots.change((), (b"one",))
    first = slots[b"one"]
    slots.prepare(checkpoint(b"one"))
    assert slots[b"one"] is first
    slots.change((b"one",), (b"one",))
    assert slots[b"one"] is not first


def test_each_preparation_of_shared_bytes_can_be_added(slots: AdapterWeights) -> None:
    """Two names with equal bytes are read twice, and may arrive in one step."""
    slots.prepare(checkpoint(b"one"))
    slots.prepare(checkpoint(b"one"))
    slots.change((), (b"one", b"one"))
    slots.prepare(checkpoint(b"one"))
    slots.change((), (b"one",))
    slots.change((b"one",), ())


def test_a_module_the_model_lacks_was_not_verified(slots: AdapterWeights) -> None:
    module = checkpoint(b"one").modules[0]
    stranger = LoRAModule("model.layers.9.mlp.down_proj", 1, 1.0, module.a, module.b)
    with pytest.raises(AssertionError, match=r"layers\.9"):
        slots.prepare(AdapterCheckpoint("/x", b"one", 1, 512, "", (stranger,)))
