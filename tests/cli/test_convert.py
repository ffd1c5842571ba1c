"""Adapters of PEFT's other methods: what is written in their place answers as PEFT itself does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.cli import peft_model
from lora_serve.cli.low_rank import EXACT, spectrum
from lora_serve.cli.main import main
from lora_serve.models.base import lora_modules
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what is asked for here

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(9)]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NO_BIAS = ["o_proj", "gate_proj", "up_proj", "down_proj"]

# Each with the highest rank of what it adds to a projection, None where that is full.
METHODS: dict[str, tuple[peft.PeftConfig, int | None]] = {
    "dora": (peft.LoraConfig(r=4, use_dora=True, target_modules=ALL), None),
    "pissa": (peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=ALL), 8),
    "a rank above the limit": (peft.LoraConfig(r=80, target_modules=ALL), 64),
    "adalora": (peft.AdaLoraConfig(init_r=5, total_step=9, target_modules=ALL), 5),
    "loha": (peft.LoHaConfig(r=3, alpha=6, target_modules=ALL), 9),
    "lokr": (peft.LoKrConfig(r=2, alpha=4, target_modules=ALL), None),
    "vera": (peft.VeraConfig(r=6, target_modules=ALL), 6),
    "ia3": (peft.IA3Config(target_modules=NO_BIAS, feedforward_modules=["down_proj"]), None),
    "hra": (peft.HRAConfig(r=4, target_modules=NO_BIAS), 4),
}


def save_adapter(base: Path, directory: Path, config: peft.PeftConfig) -> peft.PeftModel:
    """Save an adapter that is as if it had been trained."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = deepcopy(config)  # PEFT changes what it is given
    config.task_type = "CAUSAL_LM"
    adapted = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(directory))
    return adapted


def served(base: Path, adapter: Path) -> Tensor:
    """The logits of the engine's model with it, or without one where there is none."""
    model = BareModel(base, REFERENCE, torch.float32)
    projections = lora_modules(model.spec.linears())
    checkpoint = read_adapter(
        str(adapter), lora_modules=projections, max_lora_rank=128, vocabulary=model.vocabulary
    )
    return Prompt(TOKENS, range(4), model.add_adapter(checkpoint)).alone(model)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_answers_as_peft_does(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    config, highest_rank = METHODS[method]
    adapted = save_adapter(model_path, tmp_path / "adapter", config)
    with torch.no_grad():
        expected = adapted(torch.tensor([TOKENS])).logits[0]
    out = tmp_path / "out"
    words = ["convert", str(tmp_path / "adapter"), str(out), "--json"]
    assert main(words) == 0, capsys.readouterr().err
    torch.testing.assert_close(served(model_path, out), expected, rtol=0, atol=2e-3)
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "conversion.json").read_text())
    assert report["relative_error"] <= EXACT
    assert report["left_out"] == []
    if highest_rank is not None:
        assert report["rank"] == highest_rank


def test_the_error_is_told_of_each_projection_and_of_all(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    save_adapter(model_path, adapter, METHODS["dora"][0])
    words = ["convert", str(adapter), str(out), "--rank", "5"]
    assert main([*words, "--max-error", "0.01"]) == 2
    refused = capsys.readouterr().err
    assert "its relative error at rank 5 would be 0." in refused
    assert ", above --max-error 0.01; --rank 6" in refused
    assert not out.exists()
    assert main([*words, "--max-error", "1"]) == 0
    table = capsys.readouterr().out
    assert "converted" in table
    assert "(LORA, use_dora) to LoRA of rank 5, the nearest of that rank" in table
    report = json.loads((out / "conversion.json").read_text())
    base = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), adapter)
    merged = base.merge_and_unload().state_dict()
    plain = load_file(model_path / "model.safetensors")
    factors = load_file(out / "adapter_model.safetensors")
    squares = [0.0, 0.0]
    assert len(report["projections"]) == 21
    for each in report["projections"]:
        name = each["name"]
        a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        assert (len(a), b.shape[1], each["rank"]) == (5, 5, 5)
        delta = (merged[f"{name}.weight"] - plain[f"{name}.weight"]).double()
        off = torch.linalg.norm(delta - b.double() @ a.double())
        best = torch.linalg.svdvals(delta)[5:].square().sum().sqrt()  # no rank 5 is nearer
        assert float(off) == pytest.approx(float(best), rel=1e-4)
        assert each["relative_error"] == pytest.approx(
            float(off / torch.linalg.norm(delta)), rel=1e-4
        )
        squares[0] += float(off**2)
        squares[1] += float(torch.linalg.norm(delta) ** 2)
    assert report["relative_error"] == pytest.approx((squares[0] / squares[1]) ** 0.5, rel=1e-4)
    assert f"{report['relative_error']:.1e}" in table.splitlines()[-2]
    again = peft.PeftModel.from_pretrained(base.base_model.model, out)
    layer = again.get_submodule(f"base_model.model.{name}")
    torch.testing.assert_close(layer.get_delta_weight("default"), b @ a)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"r": 80, "bias": "lora_only"}, "'model.layers.0.self_attn.q_proj.bias'"),
        ({"modules_to_save": ["model.norm"]}, "'model.norm.weight'"),
        ({"r": 80, "target_modules": ["o_proj", "embed_tokens"]}, "'model.embed_tokens.weight'"),
    ],
)
def test_what_lora_cannot_hold_is_named_and_left_out_only_on_demand(
    model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    named: str,
) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    config = peft.LoraConfig(**({"r": 4, "target_modules": ["q_proj", "o_proj"]} | settings))
    save_adapter(model_path, adapter, config)
    assert main(["convert", str(adapter), str(out)]) == 2
    refused = capsys.readouterr().err
    assert "it changes what LoRA on projections cannot hold: " in refused
    assert named in refused
    assert not out.exists()
    assert main(["convert", str(adapter), str(out), "--partial"]) == 0
    assert named in capsys.readouterr().out.partition("left out: ")[2]
    ours, theirs = load_file(out / "adapter_model.safetensors"), {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        if "lora_embedding" not in name:
            theirs[name] = tensor.double()
    scale = config.lora_alpha / config.r
    for name in (name for name in ours if name.endswith("lora_A.weight")):
        other = name.replace("lora_A", "lora_B")
        delta = scale * theirs[other] @ theirs[name]
        got = ours[other].double() @ ours[name].double()
        torch.testing.assert_close(got, delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"trainable_token_indices": [7, 2]}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_rows_of_embeddings_and_lm_head_are_carried_over(
    model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    config = peft.LoraConfig(r=4, use_dora=True, target_modules=["k_proj"], **settings)
    adapted = save_adapter(model_path, tmp_path / "adapter", config)
    with torch.no_grad():
        expected = adapted(torch.tensor([TOKENS])).logits[0]
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "adapter"), str(out)]) == 0, capsys.readouterr().err
    torch.testing.assert_close(served(model_path, out), expected, rtol=0, atol=2e-3)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), out)
    with torch.no_grad():
        torch.testing.assert_close(again(torch.tensor([TOKENS])).logits[0], expected)


def edited(**changes: Any) -> Callable[[Path, Path], None]:
    def edit(model: Path, adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def add_stranger(model: Path, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.experts.lora_A": torch.ones(2)}, path)


def nest_config(model: Path, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text('{"a":' + "[" * 100_000)


def save_as_pickle(model: Path, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.unlink()


OTHERS: dict[str, peft.PeftConfig] = {
    "loha": peft.LoHaConfig(r=3, target_modules=["o_proj"]),
    "plain": peft.LoraConfig(r=4, target_modules=["q_proj"]),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=4),
    "activated": peft.LoraConfig(
        r=80, target_modules=["q_proj"], alora_invocation_tokens=[0], task_type="CAUSAL_LM"
    ),
}


@pytest.fixture(scope="module")
def others(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by their kinds; not to be written to."""
    found = {kind: tmp_path_factory.mktemp("adapter") for kind in OTHERS}
    for kind, config in OTHERS.items():
        save_adapter(model_path, found[kind], config)
    return found


@pytest.mark.parametrize(
    ("kind", "break_it", "words"),
    [
        ("plain", None, "is a plain LoRA adapter of rank 4 already"),
        ("prompt tuning", None, "PROMPT_TUNING puts virtual tokens before prompts; it changes no"),
        (
            "activated",
            None,
            "alora_invocation_tokens is [0]: an activated LoRA acts from these tokens on, and "
            "weights act on all; serve it as it is, with --max-lora-rank of at least its r, 80",
        ),
        ("loha", lambda model, adapter: shutil.rmtree(adapter), "No adapter found"),
        ("loha", lambda model, adapter: shutil.rmtree(model), "neither a directory nor a hub id"),
        ("loha", lambda model, adapter: (model.parent / "out").mkdir(), "exists already"),
        ("loha", edited(peft_type="NEXT"), "cannot be added to"),
        ("loha", edited(r=10**12), "cannot be added to"),
        ("loha", edited(r=2), "cannot be added to"),
        ("loha", edited(base_model_name_or_path=None), "name it: --base MODEL"),
        ("loha", edited(target_modules=["o_proj", "up_proj"]), "missing adapter keys"),
        ("loha", edited(megatron_config={"a": 1}), "Megatron's parallel layers cannot be read"),
        ("loha", edited(peft_type="XLORA", adapters={"a": "org/b"}), "adapters that lie elsewhere"),
        ("loha", nest_config, "adapter_config.json is not valid JSON"),
        ("loha", save_as_pickle, "adapter_model.bin is a pickle, which can run code"),
        (
            "loha",
            lambda model, adapter: (adapter / "adapter_model.safetensors").unlink(),
            "there is no adapter_model.safetensors",
        ),
        ("loha", add_stranger, "cannot hold: 'base_model.model.experts.lora_A'; --partial"),
        (
            "loha",
            lambda model, adapter: (adapter / "adapter_model.safetensors").write_bytes(b"x"),
            "cannot be added to",
        ),
    ],
)
def test_what_cannot_be_converted_is_told_in_a_line_and_leaves_nothing(
    model_path: Path,
    others: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    break_it: Callable[[Path, Path], None] | None,
    words: str,
) -> None:
    model, adapter, out = tmp_path / "model", tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(model_path, model)
    shutil.copytree(others[kind], adapter)
    edited(base_model_name_or_path=str(model))(model, adapter)
    if break_it is not None:
        break_it(model, adapter)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", str(adapter), str(out)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    assert sorted(tmp_path.iterdir()) == before


def test_an_adapter_that_asks_for_memory_gets_no_more_than_its_files_can_need(
    model_path: Path,
    others: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of its config is memory before a tensor of its file is compared with it."""
    monkeypatch.setattr(peft_model, "_ROOM_BYTES", 2**20)
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(others["loha"], adapter)
    edited(r=10**6)(model_path, adapter)  # 256 MB and more for each projection
    assert main(["convert", str(adapter), str(out), "--base", str(model_path)]) == 2
    assert "allocate memory" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_that_would_match_for_ever_is_refused(
    model_path: Path,
    others: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
) -> None:
    monkeypatch.setattr(peft_model, "_MATCHING_SECONDS", 0.3)
    adapter, pattern = tmp_path / "adapter", r"(?:[a-z_.0-9]+)+!"
    shutil.copytree(others["loha"], adapter)
    edited(**{setting: {pattern: 3} if setting == "rank_pattern" else pattern})(model_path, adapter)
    assert main(["convert", str(adapter), str(tmp_path / "out"), "--base", str(model_path)]) == 2
    assert "its patterns took longer than 0.3 s to match" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rank", "0"), "--rank 0: must be at least 1"),
        (("--max-error", "0"), "--max-error 0: must be above 0 and at most 1"),
        (("--max-error", "nan"), "--max-error nan: must be"),
    ],
)
def test_numbers_are_checked_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), *words]) == 2
    assert told in capsys.readouterr().err


# ── the arithmetic ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(30, 20), (20, 30)])
def test_factors_of_low_rank_are_exact_and_of_the_lowest(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    b, a = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((shape[0], 4), (4, shape[1]))
    )
    found = spectrum(b @ a)
    factors = found.factors(10)
    assert factors.rank == found.rank_for(EXACT) == 4
    assert factors.error <= EXACT * factors.norm
    assert factors.norm == pytest.approx(float(torch.linalg.norm(b @ a)))
    lengths = torch.linalg.norm(factors.b, dim=0), torch.linalg.norm(factors.a, dim=1)
    torch.testing.assert_close(*lengths)
    singular = torch.linalg.svdvals(b @ a)
    for rank in range(5):
        share = float(singular[rank:].square().sum().sqrt() / factors.norm)
        assert found.rank_for(share * 1.001 + EXACT) == rank
        assert found.factors(rank).error == pytest.approx(share * factors.norm, abs=1e-5)


def test_no_change_has_no_rank() -> None:
    factors = spectrum(torch.zeros(3, 4, dtype=torch.float64)).factors(2)
    assert (factors.rank, factors.norm, factors.error) == (0, 0.0, 0.0)
    assert (factors.a.shape, factors.b.shape) == ((0, 4), (3, 0))
