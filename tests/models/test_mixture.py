"""What configs of mixtures of experts say, and that each of their facts shows in the logits."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.errors import AdapterFormatError, ConfigError
from lora_serve.layers.limited_swiglu import SwiGLULimits
from lora_serve.models.base import lora_modules
from lora_serve.models.dense import DenseSpec
from lora_serve.models.mixture import Mixture
from lora_serve.models.source import load_spec
from lora_serve.ops.contract import ChosenExperts, Ops
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from tests.fakes.adapter_files import lora_tensors, write_adapter
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.gguf_files import save_gguf
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.quantized_checkpoints import gptq, save_quantized
from tests.fakes.tiny_models import MIXTURES, VOCAB_SIZE
from tests.models.configs import read

TOKENS = [(7 * i) % VOCAB_SIZE for i in range(40)]


def mixture_of(family: str, **changes: Any) -> Mixture:
    spec = read(architectures=[f"{family}ForCausalLM"], **changes)
    assert spec.mixture is not None
    return spec.mixture


def test_silent_configs_have_their_familys_numbers() -> None:
    found = {
        family: mixture_of(family, num_hidden_layers=2, num_key_value_heads=2)
        for family in ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe", "GptOss", "GraniteMoe")
    }
    counts = {name: (each.num_experts, each.num_chosen) for name, each in found.items()}
    assert counts == {
        "Mixtral": (8, 2),
        "Olmoe": (64, 8),
        "Qwen2Moe": (60, 4),
        "Qwen3Moe": (128, 8),
        "GptOss": (128, 4),
        "GraniteMoe": (8, 2),
    }
    sizes = {name: each.intermediate_size for name, each in found.items()}
    assert sizes == {
        "Mixtral": 96,
        "Olmoe": 96,
        "Qwen2Moe": 1408,
        "Qwen3Moe": 768,
        "GptOss": 96,
        "GraniteMoe": 96,
    }
    assert {name: each.shared_size for name, each in found.items() if each.shared_size} == {
        "Qwen2Moe": 5632
    }
    among_chosen = [name for name, each in found.items() if each.among_chosen]
    assert among_chosen == ["Mixtral", "GptOss", "GraniteMoe"]
    assert {each.layers for each in found.values()} == {(0, 1)}


def test_a_silent_gpt_oss_has_windows_in_turns_and_yarn() -> None:
    spec = read(architectures=["GptOssForCausalLM"], num_hidden_layers=3, num_key_value_heads=2)
    assert spec.windows == (128, None, 128)
    assert (spec.head_size, spec.qkv_bias, spec.output_bias) == (64, True, True)
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    told = {**yarn, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    older = read(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=3,
        num_key_value_heads=2,
        rope_scaling=told,
        rope_theta=150000,
    )
    assert older.rope == spec.rope
    assert older.max_positions == 4096 * 32


def test_a_granites_expert_of_all_rows_may_be_left_out() -> None:
    family, size = "GraniteMoeShared", "shared_intermediate_size"
    assert mixture_of(family).shared_size is None
    assert mixture_of(family, **{size: 0}) == mixture_of("GraniteMoe")
    assert mixture_of(family, **{size: 48}).shared_size == 48


def test_experts_are_counted_in_either_spelling() -> None:
    assert mixture_of("Olmoe", num_experts=16).num_experts == 16
    assert mixture_of("Qwen3Moe", num_key_value_heads=2, num_local_experts=16).num_experts == 16


def test_layers_without_experts_have_an_mlp() -> None:
    qwen = {"num_hidden_layers": 6, "num_key_value_heads": 2}
    assert mixture_of("Qwen3Moe", decoder_sparse_step=2, **qwen).layers == (1, 3, 5)
    assert mixture_of("Qwen3Moe", mlp_only_layers=[0, 5], **qwen).layers == (1, 2, 3, 4)


def test_adapters_change_attention_and_what_all_tokens_share(
    directories: dict[str, Path],
) -> None:
    """And linear layers are numbered in their order where layers have fewer of them."""
    spec = read(
        architectures=["Qwen2MoeForCausalLM"],
        num_key_value_heads=2,
        mlp_only_layers=[1],
        moe_intermediate_size=40,
        shared_expert_intermediate_size=48,
    )
    modules = lora_modules(spec.linears())
    assert modules["model.layers.0.mlp.shared_expert.down_proj"] == (64, 48)
    assert modules["model.layers.1.mlp.down_proj"] == (64, 96)
    assert not any("experts." in name or name.endswith("gate") for name in modules)
    olmoe = read(architectures=["OlmoeForCausalLM"])
    assert [linear.index for linear in olmoe.linears()] == [0, 1, 2, 3]
    assert olmoe.linears()[2].projections[0] == ("model.layers.1.self_attn.q_proj", 64)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate",
        "mlp.shared_expert_gate",
        "mlp.experts.1.up_proj",
        "mlp.experts",  # as PEFT names the tensors of all experts together
        "mlp.experts.base_layer",
    ],
)
def test_adapters_on_what_chooses_or_is_chosen_are_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    spec = read(
        architectures=["Qwen2MoeForCausalLM"],
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=48,
    )
    modules = lora_modules(spec.linears())
    served = {"model.layers.0.self_attn.q_proj": (64, 64)}
    path = write_adapter(tmp_path / "served", lora_tensors(served))
    assert read_adapter(path, lora_modules=modules, max_lora_rank=8).rank == 4
    refused = f"model.layers.0.{name}"
    tensors = lora_tensors(served | {refused: (40, 64)})
    path = write_adapter(tmp_path / "other", tensors, {"target_modules": ".*"})
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(path, lora_modules=modules, max_lora_rank=8)
    (finding,) = error.value.findings
    assert f"'base_model.model.{refused}.lora_A.weight'" in finding


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("Olmoe", {"clip_qkv": 0}, "clip_qkv must be a positive number"),
        ("Olmoe", {"num_experts": 4}, "num_experts_per_tok 8 is more than there are experts, 4"),
        ("Mixtral", {"num_local_experts": "8"}, "num_local_experts must be a whole number"),
        ("Mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ("Qwen2Moe", {"use_sliding_window": True}, "use_sliding_window is not supported with"),
        ("Qwen3Moe", {"mlp_only_layers": "0"}, "mlp_only_layers must be a list of layers, is 0"),
        ("Qwen3Moe", {"norm_topk_prob": 1}, "norm_topk_prob must be"),
        ("GraniteMoe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ("GraniteMoeShared", {"shared_intermediate_size": -1}, "must be a whole number from 0 on"),
        ("GptOss", {"swiglu_limit": 0}, "swiglu_limit must be a positive number"),
        ("GptOss", {"layer_types": ["linear_attention"] * 2}, "layers of linear_attention are not"),
        ("GptOss", {"num_key_value_heads": 2, "hidden_act": "gelu"}, "hidden_act 'gelu' is not"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    family: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        mixture_of(family, **changes)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("family", "fact"),
    [
        *((family, fact) for family in MIXTURES for fact in ("among_chosen", "num_chosen")),
        *(("gpt-oss", fact) for fact in ("alpha", "limit", "activation")),
    ],
)
def test_every_fact_shows_in_the_logits(
    directories: dict[str, Path], family: str, fact: str
) -> None:
    """So that the comparison with transformers would tell if one were not heeded."""

    def changed(spec: DenseSpec) -> DenseSpec:
        mixture = spec.mixture
        assert mixture is not None
        changes = {
            "among_chosen": {"among_chosen": not mixture.among_chosen},
            "num_chosen": {"num_chosen": mixture.num_chosen + 1},
            "alpha": {"swiglu": SwiGLULimits(1.0, 0.4)},
            "limit": {"swiglu": SwiGLULimits(1.702, 7.0)},
            "activation": {"swiglu": None},
        }
        return replace(spec, mixture=replace(mixture, **changes[fact]))

    prompt = Prompt(TOKENS, range(6))
    with_it = BareModel(directories[family], REFERENCE, torch.float32)
    without = BareModel(directories[family], REFERENCE, torch.float32, change_spec=changed)
    assert (prompt.alone(with_it) - prompt.alone(without)).abs().max() > 1e-2


@pytest.mark.parametrize("family", MIXTURES)
def test_each_fact_that_a_mixture_has_of_its_own_is_asked_for_in_the_logits(
    directories: dict[str, Path], family: str
) -> None:
    """But for those that bring tensors: without them the checkpoint's are unexpected."""
    spec = load_spec(directories[family])
    assert isinstance(spec, DenseSpec)
    assert spec.mixture is not None
    for fact in fields(Mixture):
        if fact.default in (MISSING, getattr(spec.mixture, fact.name)) or fact.name == "swiglu":
            continue
        common = replace(spec.mixture, **{fact.name: fact.default})
        shapes = replace(spec, mixture=common).tensor_shapes()
        assert shapes != spec.tensor_shapes(), f"{fact.name} is none of the facts above"


class LimitedExperts:
    """The reference's experts as others serve them: each takes so many rows of a step at most."""

    capacity = 12

    def __getattr__(self, name: str) -> Any:
        return getattr(REFERENCE.experts, name)

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool) -> ChosenExperts:
        chosen = REFERENCE.experts.choose(logits, num_chosen, among_chosen)
        for expert in range(logits.shape[1]):
            pairs = (chosen.ids == expert).nonzero()[self.capacity :]
            chosen.weights[pairs[:, 0], pairs[:, 1]] = 0.0
        return chosen


@pytest.mark.parametrize("experts", [REFERENCE.experts, LimitedExperts()], ids=["ours", "limited"])
def test_experts_that_turn_rows_away_would_show_in_others_answers(
    directories: dict[str, Path], experts: Any
) -> None:
    """What `tests/models/test_base.py` asks of every family catches that fault."""
    model = BareModel(directories["olmoe"], replace(REFERENCE, experts=experts), torch.float32)
    one, other = Prompt(TOKENS[:9], range(5)), Prompt(TOKENS, range(10, 18))
    alone = one.alone(model)
    model.poison()
    mixed = model.step([other.chunk(0, 40), one.chunk(0, 9)])
    assert torch.equal(mixed[1], alone) == (experts is REFERENCE.experts)


def with_codes(model: PreTrainedModel, directory: Path, form: str) -> Path:
    """An OLMoE whose experts are codes; "gptq-but-one": but for one's, which are in no order."""
    if form == "gguf":

        def type_of(name: str) -> GgmlType:
            return GgmlType.Q8_0 if "_exps" in name else GgmlType.F32

        return save_gguf(model, directory / "m.gguf", type_of)
    path = directory / "model"
    save_quantized(model, path, gptq(4, 32))
    if form == "gptq-but-one":
        tensors = load_file(path / "model.safetensors")
        tensors["model.layers.1.mlp.experts.3.up_proj.g_idx"] %= 2
        tensors["model.layers.1.mlp.experts.3.up_proj.g_idx"][:5] = 1
        save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    "ops", [ops for ops in available_ops().values() if ops.pack_codes], ids=lambda ops: ops.name
)
@pytest.mark.parametrize(("form", "num_kept"), [("gguf", 30), ("gptq", 30), ("gptq-but-one", 20)])
def test_experts_keep_the_codes_of_their_checkpoint(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path, ops: Ops, form: str, num_kept: int
) -> None:
    """They answer as their dequantised weights, alone and in company, also to an adapter's."""
    path = with_codes(tiny_models["olmoe"], tmp_path, form)
    ours = BareModel(path, ops, torch.float32, keeps_codes=True)
    floats = BareModel(path, REFERENCE, torch.float32)
    assert sum(".experts." in name for name in ours.kept_codes) == num_kept
    assert not floats.kept_codes
    checkpoint = read_saved(make_peft("olmoe", seed=1), tmp_path / "adapter", ours.spec)
    prompt = Prompt(TOKENS, range(6), ours.add_adapter(checkpoint))
    floats.add_adapter(checkpoint)
    alone = prompt.alone(ours)
    torch.testing.assert_close(alone, prompt.alone(floats), atol=2e-4, rtol=0)
    ours.poison()
    mixed = ours.step([Prompt(TOKENS[3:30], range(10, 18)).chunk(0, 27), prompt.chunk(0, 40)])
    assert torch.equal(mixed[1], alone)
