"""LoRA on experts: what PEFT computes, in either spelling, and each row's own bits in company."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lora_serve.adapters.checkpoint import own_shapes, read_adapter
from lora_serve.errors import AdapterFormatError
from lora_serve.layers import expert_lora
from lora_serve.models.base import adapted_modules, lora_modules
from lora_serve.models.source import load_spec
from lora_serve.ops.contract import Ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from tests.fakes.adapter_files import lora_tensors, random_tensor, write_adapter
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.peft_adapters import make_peft, read_saved, save_adapter
from tests.fakes.tiny_models import MIXTURES, VOCAB_SIZE

BACKENDS = pytest.mark.parametrize("ops", available_ops().values(), ids=lambda ops: ops.name)
TOKENS = [(7 * i) % VOCAB_SIZE for i in range(40)]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
PATTERNS = {"rank_pattern": {"gate_up_proj": 3}, "alpha_pattern": {r"experts\.down_proj": 5}}
LAYER = "model.layers.0.mlp.experts"


def their_logits(model: PeftModel | PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {"target_parameters": BOTH, **PATTERNS}) for family in MIXTURES),
        ("mixtral", {"target_parameters": ["gate_up_proj"], "use_rslora": True}),
        ("olmoe", {"target_parameters": [f"{LAYER}.down_proj"], "target_modules": []}),
    ],
    ids=str,
)
def test_deltas_of_all_experts_together_are_pefts(
    directories: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    theirs = make_peft(family, 1, **settings)
    for ops in available_ops().values():
        ours = BareModel(directories[family], ops, torch.float32)
        prompt = Prompt(TOKENS, range(6), ours.add_adapter(read_saved(theirs, tmp_path, ours.spec)))
        got = prompt.alone(ours)
        torch.testing.assert_close(got, their_logits(theirs), atol=5e-5, rtol=0)
        assert (got - Prompt(TOKENS, range(6)).alone(ours)).abs().max() > 0.1


@BACKENDS
def test_deltas_of_each_expert_are_those_of_merged_weights(
    directories: dict[str, Path], tmp_path: Path, ops: Ops
) -> None:
    """PEFT stored them so when transformers had a module for each; some have ranks of their own."""
    spec = load_spec(directories["mixtral"])
    shapes = lora_modules(spec.expert_linears())
    ranks = {name: 3 if name.endswith("w3") else 4 for name in shapes}
    tensors = {}
    for name, shape in shapes.items():
        tensors |= lora_tensors({name: shape}, ranks[name], seed=len(tensors))
    settings = {"rank_pattern": {"w3": 3}, "alpha_pattern": {"w3": 1}}
    settings |= {"target_modules": ["w1", "w2", "w3"]}
    read = read_adapter(
        write_adapter(tmp_path / "adapter", tensors, settings),
        lora_modules=shapes,
        max_lora_rank=8,
    )
    assert len(read.modules) == len(shapes) == 30
    stored = load_file(directories["mixtral"] / "model.safetensors")
    for module in read.modules:
        a, b = (
            torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(raw.shape)
            for raw in (module.a, module.b)
        )
        assert module.scale == (1 / 3 if module.name.endswith("w3") else 2)
        stored[f"{module.name}.weight"] += module.scale * b @ a
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((directories["mixtral"] / "config.json").read_bytes())
    save_file(stored, merged / "model.safetensors")
    expected = Prompt(TOKENS, range(6)).alone(BareModel(merged, REFERENCE, torch.float32))
    ours = BareModel(directories["mixtral"], ops, torch.float32)
    got = Prompt(TOKENS, range(6), ours.add_adapter(read)).alone(ours)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)


def each_by_itself(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """What PEFT would have stored of a module for each of `count` experts."""
    found = {}
    for name, a in tensors.items():
        if ".experts." not in name or "lora_A" not in name:
            continue
        is_gate_up = ".base_layer." in name
        module = name.partition(".experts.")[0] + ".experts"
        all_b = tensors[name.replace("lora_A", "lora_B")]
        all_b = all_b.view(len(all_b), -1, count)
        for expert, own_a in enumerate(a.view(count, -1, a.shape[1])):
            own_b = all_b[:, :, expert]
            names = ("gate_proj", "up_proj") if is_gate_up else ("down_proj",)
            for projection, part in zip(names, own_b.chunk(len(names)), strict=True):
                found[f"{module}.{expert}.{projection}.lora_A.weight"] = own_a.clone()
                found[f"{module}.{expert}.{projection}.lora_B.weight"] = part.contiguous()
    return found


def with_sides_swapped(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """What PEFT before 0.19.1 stored: A has what is given, B what is taken."""
    swapped = {}
    for name, a in tensors.items():
        if ".experts." in name and "lora_A" in name:
            b_name = name.replace("lora_A", "lora_B")
            b, rank = tensors[b_name], len(a) // count
            columns = b.view(len(b), rank, count).permute(2, 1, 0).reshape(count * rank, -1)
            rows = a.view(count, rank, -1).permute(2, 1, 0).reshape(a.shape[1], -1)
            swapped |= {name: columns.contiguous(), b_name: rows.contiguous()}
    return swapped


@pytest.mark.parametrize("spelling", [each_by_itself, with_sides_swapped])
def test_other_spellings_are_the_same_adapter(
    directories: dict[str, Path], tmp_path: Path, spelling: Any
) -> None:
    spec = load_spec(directories["olmoe"])
    adapter = make_peft("olmoe", 1, target_parameters=BOTH)
    file, modules = tmp_path / "adapter_model.safetensors", adapted_modules(spec)
    save_adapter(adapter, tmp_path)
    tensors = load_file(file)
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name] = tensors[name].bfloat16()  # the sides may differ
    save_file(tensors, file)
    together = read_adapter(str(tmp_path), lora_modules=modules, max_lora_rank=8)
    kept = {name: each for name, each in tensors.items() if ".experts." not in name}
    save_file(kept | spelling(tensors, 5), file)
    if spelling is each_by_itself:
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config |= {"target_parameters": None, "target_modules": ".*_proj"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    read = read_adapter(str(tmp_path), lora_modules=modules, max_lora_rank=8)
    assert read.digest == together.digest


def grouped_by_expert_alone(
    ops: Ops, changes: expert_lora.ExpertChanges, chosen: Any
) -> expert_lora.ExpertDeltas:
    """The fault of which company tells: all rows get the deltas of the first adapter's experts."""
    adapters = changes[0][2]
    return expert_lora.ExpertDeltas(ops, [(s, e, adapters) for s, e, _ in changes], chosen)


def bits_in_company(model: BareModel, prompts: Sequence[Prompt]) -> tuple[list[Tensor], ...]:
    """Each prompt's logits alone, and in steps with the others, in chunks."""
    alone = [prompt.alone(model) for prompt in prompts]
    model.poison()
    mixed: list[list[Tensor]] = [[] for _ in prompts]
    for start, end in ((0, 7), (7, 39), (39, 40)):
        step = model.step([prompt.chunk(start, end) for prompt in prompts])
        for logits, found in zip(step, mixed, strict=True):
            found.append(logits)
    return alone, [torch.cat(found) for found in mixed]


@pytest.mark.parametrize("is_broken", [False, True], ids=["ours", "broken"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@BACKENDS
def test_company_changes_no_bit_of_an_adapter_on_experts(
    directories: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ops: Ops,
    dtype: torch.dtype,
    is_broken: bool,
) -> None:
    if is_broken:
        fault = grouped_by_expert_alone
        monkeypatch.setattr("lora_serve.layers.experts.ExpertDeltas", fault)
    model = BareModel(directories["qwen2-moe"], ops, dtype)
    refs = [
        model.add_adapter(read_saved(make_peft("qwen2-moe", seed, **one), tmp_path, model.spec))
        for seed, one in enumerate(
            ({"target_parameters": BOTH, **PATTERNS}, {"target_parameters": BOTH[:1]}, {})
        )
    ]
    prompts = [
        Prompt(TOKENS, [9, 1, 30]),
        *(Prompt(TOKENS, [*range(5 * i, 5 * i + 3)], ref) for i, ref in enumerate(refs, start=3)),
    ]
    alone, mixed = bits_in_company(model, prompts)
    assert all(map(torch.equal, alone, mixed)) == (not is_broken)
    assert len({tuple(logits[-1].tolist()) for logits in alone}) == 4


@pytest.fixture(scope="module")
def served(directories: dict[str, Path]) -> dict[str, tuple[int, int]]:
    spec = load_spec(directories["olmoe"])
    return adapted_modules(spec)


def fused(
    count: int = 5, rank: int = 4, hidden: int = 64, inner: int = 96, layer: str = LAYER
) -> dict[str, Any]:
    """LoRA of all experts together, of both parameters."""
    sizes = {f"{layer}.base_layer": (2 * inner, hidden), layer: (hidden, inner)}
    return {
        f"base_model.model.{name}.lora_{side}.weight": random_tensor(shape, 1)
        for name, (out, into) in sizes.items()
        for side, shape in (("A", (count * rank, into)), ("B", (out, count * rank)))
    }


ALL_OF_LAYER = [f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"]
ONE_EXPERT = {f"{LAYER}.3.{name}": (96, 64) for name in ("gate_proj", "up_proj")}


@pytest.mark.parametrize(
    ("tensors", "settings", "told"),
    [
        (fused(), {}, ["no target_parameters that say of what"]),
        (fused(count=6), {"target_parameters": ALL_OF_LAYER}, ["not (20, 64) and (192, 20)"]),
        (
            fused(inner=90),
            {"target_parameters": ALL_OF_LAYER},
            ["gate_up_proj: (20, 64) and (180, 20)"],
        ),
        (fused(rank=8), {"target_parameters": ALL_OF_LAYER}, ["(40, 64) and (192, 40)"]),
        (fused(rank=16), {"target_parameters": ALL_OF_LAYER, "r": 16}, ["rank 16 is greater"]),
        (
            fused(),
            {"target_parameters": ALL_OF_LAYER[:1]},
            ["gate_up_proj: (20, 96) and (64, 20)", ".base_layer.lora_A.weight"],
        ),
        (dict(list(fused().items())[:3]), {"target_parameters": ALL_OF_LAYER}, ["incomplete"]),
        (
            fused(),
            {"target_parameters": ["mlp.gate.weight"]},
            ["'mlp.gate.weight': only experts'", ".base_layer.lora_A"],
        ),
        (
            fused(),
            {"target_parameters": "experts"},
            ["must be a list of names", "no target_parameters"],
        ),
        (
            lora_tensors(ONE_EXPERT),
            {},
            ["without others: 'model.layers.0.mlp.experts.0.gate_proj'"],
        ),
        (
            lora_tensors({f"{LAYER}.5.up_proj": (96, 64)}),
            {},
            ["of experts 0 to 4: 'base_model.model.model.layers.0.mlp.experts.5.up_proj"],
        ),
        (lora_tensors({f"{LAYER}.01.up_proj": (96, 64)}), {}, ["experts 0 to 4: "]),
        (
            lora_tensors({"model.layers.0.mlp.gate_proj": (96, 64), "model.norm": (64, 64)}),
            {"target_modules": ["gate_proj", "norm"]},
            [
                "LoRA on the MLPs of layers that have experts in this model: 'base_model.model."
                "model.layers.0.mlp.gate_proj.lora_A.weight', ",
                "(experts.down_proj, experts.gate_proj, experts.up_proj, k_proj, ",
            ],
        ),
        (
            {f"base_model.model.{LAYER}.3.up_proj.lora_B.bias": random_tensor((96,), 1)},
            {"lora_bias": True},
            ["tensors of experts that are no lora_A or lora_B"],
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_what_fits_no_experts_is_refused(
    served: dict[str, tuple[int, int]],
    tmp_path: Path,
    tensors: dict[str, Any],
    settings: dict[str, Any],
    told: list[str],
) -> None:
    path = write_adapter(tmp_path, tensors, settings)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(path, lora_modules=served, max_lora_rank=8)
    findings = error.value.findings
    assert len(findings) == len(told), findings
    assert all(words in finding for words, finding in zip(told, findings, strict=True))


def test_experts_stored_together_and_each_by_itself_are_refused(
    served: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    of_each = {name: shape for name, shape in served.items() if name.startswith(f"{LAYER}.")}
    tensors = fused() | lora_tensors(of_each)
    path = write_adapter(tmp_path, tensors, {"target_parameters": BOTH})
    with pytest.raises(AdapterFormatError, match="together, and of each"):
        read_adapter(path, lora_modules=served, max_lora_rank=8)


def test_where_sides_have_one_size_the_version_says_which_is_which(tmp_path: Path) -> None:
    square = {f"{LAYER}.{e}.{p}": (32, 64) for e in range(2) for p in ("gate_proj", "up_proj")}
    tensors = {
        f"base_model.model.{LAYER}.lora_{side}.weight": random_tensor(shape, seed)
        for seed, (side, shape) in enumerate((("A", (8, 64)), ("B", (64, 8))))
    }

    def digest(version: str | None) -> bytes:
        settings = {"target_parameters": BOTH[:1], "peft_version": version}
        path = write_adapter(tmp_path, tensors, settings)
        return read_adapter(path, lora_modules=square, max_lora_rank=8).digest

    assert digest("0.21.2") == digest("0.19.1.dev0@abc") != digest("0.19.0") == digest("0.17")
    for version in (None, "new"):
        with pytest.raises(AdapterFormatError, match="without peft_version"):
            digest(version)


def test_experts_together_are_not_judged_without_their_model(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, fused(), {"target_parameters": BOTH})
    with pytest.raises(AdapterFormatError, match="tells apart: name that, with --base MODEL"):
        own_shapes(path)


def test_experts_are_refused_where_adapters_may_change_none(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    modules = lora_modules(load_spec(directories["olmoe"]).linears())
    path = write_adapter(tmp_path, fused(), {"target_parameters": BOTH})
    with pytest.raises(AdapterFormatError, match="where adapters may change none"):
        read_adapter(path, lora_modules=modules, max_lora_rank=8)


def test_experts_may_have_a_limit_of_their_own(
    served: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path, fused(), {"target_parameters": ALL_OF_LAYER})
    read_adapter(path, lora_modules=served, max_lora_rank=8, max_expert_rank=4)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(path, lora_modules=served, max_lora_rank=8, max_expert_rank=3)
    (finding,) = error.value.findings
    assert "rank 4 is greater than max_lora_expert_rank 3; raise --max-lora-expert-rank" in finding


def test_numbers_of_a_file_alone_are_not_believed(tmp_path: Path) -> None:
    tensors = lora_tensors({f"{LAYER}.{10**9}.up_proj": (8, 8), f"{LAYER}.9999.up_proj": (8, 8)})
    modules, _ = own_shapes(write_adapter(tmp_path, tensors))
    assert len(modules) == 2
