"""What PEFT saves is read with the delta that PEFT itself computes from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import LlamaConfig, LlamaForCausalLM

from lora_serve.adapter_checkpoint import RawTensor
from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.adapters.target_modules import parse_targets
from lora_serve.errors import AdapterFormatError
from tests.adapters.conftest import Shapes

# PEFT asks transformers for an attribute under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
        )
    )


def trained(config: LoraConfig, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model whose every LoRA weight is random, as if it had been trained."""
    model = get_peft_model(tiny_llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
            parameter.data = parameter.data.to(dtype)
    return model


def as_torch(tensor: RawTensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(tensor.data), dtype=DTYPES[tensor.dtype])
    return flat.reshape(tensor.shape).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ALL},
        {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {
            "r": 4,
            "target_modules": "all-linear",
            # PEFT sorts the keys when it saves, and the first match wins when it loads.
            "rank_pattern": {"^model.layers.0.*": 3, r"layers\.1\.mlp\..*": 6, "q_proj": 2},
            "alpha_pattern": {"k_proj|v_proj": 5, "model.layers.1.self_attn.o_proj": 1},
        },
        {"r": 2, "target_modules": r".*\.1\.mlp\.(up|gate)_proj", "init_lora_weights": "gaussian"},
        {
            "r": 2,
            "target_modules": ALL,
            "layers_to_transform": 1,
            "init_lora_weights": "orthogonal",
        },
        {"r": 2, "target_modules": ["v_proj"], "fan_in_fan_out": False, "lora_dropout": 0.5},
    ],
    ids=["plain", "rslora", "patterns", "regex", "one layer", "dropout"],
)
def test_deltas_are_pefts(
    tmp_path: Path, lora_modules: Shapes, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    trained(LoraConfig(task_type="CAUSAL_LM", **settings), dtype).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    checkpoint = read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    adapted = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }
    assert [module.name for module in checkpoint.modules] == sorted(adapted)
    for module in checkpoint.modules:
        layer = adapted[module.name]
        assert module.scale == layer.scaling["default"]
        assert module.rank == layer.r["default"]
        delta = as_torch(module.b) @ as_torch(module.a) * module.scale
        torch.testing.assert_close(delta, layer.get_delta_weight("default"))


def test_an_activated_adapter_has_the_tokens_that_peft_saved(
    tmp_path: Path, lora_modules: Shapes
) -> None:
    config = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=ALL, alora_invocation_tokens=[3, 4]
    )
    trained(config).save_pretrained(tmp_path)
    activated = read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    assert activated.invocation_tokens == (3, 4)
    text = (tmp_path / "adapter_config.json").read_text()
    digests = {activated.digest}
    for tokens in (None, [3], [4, 3]):
        changed = json.loads(text) | {"alora_invocation_tokens": tokens}
        (tmp_path / "adapter_config.json").write_text(json.dumps(changed))
        read = read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
        assert read.invocation_tokens == tuple(tokens or ())
        digests.add(read.digest)
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of most of these
def test_what_peft_can_do_and_we_cannot_is_refused_by_name(
    tmp_path: Path, lora_modules: Shapes, settings: dict[str, Any], named: str
) -> None:
    config = LoraConfig(
        task_type="CAUSAL_LM", **({"r": 2, "target_modules": ["q_proj"]} | settings)
    )
    get_peft_model(tiny_llama(), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    assert named in str(error.value)


# ── what PEFT leaves out ────────────────────────────────────────────────────────────────────


def loaded_by_peft(directory: Path) -> list[str]:
    """The modules to which PEFT adds something when it has loaded an adapter."""
    return sorted(
        name.removeprefix("base_model.model.")
        for name, layer in PeftModel.from_pretrained(tiny_llama(), directory).named_modules()
        if hasattr(layer, "get_delta_weight") and layer.get_delta_weight("default").any()
    )


def edit_settings(directory: Path, settings: dict[str, Any]) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)
OF_MODULES: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj", "mlp.down_proj"]},
    {"target_modules": ["proj", "model.layers.1.mlp.up_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-linear", "exclude_modules": r".*\.1\..*"},
    {"target_modules": r".*\.0\..*_proj"},
    {"target_modules": r"q_proj|.*k_proj"},
    {"target_modules": r"^(?!.*mlp).*proj$"},
    {"target_modules": UNSLOTH},
    {"exclude_modules": ["q_proj", "layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]},
    {"layers_to_transform": 1},
    {"layers_to_transform": [0], "layers_pattern": "layers"},
    {"layers_to_transform": [1], "layers_pattern": ["h", "model.l[a-z]+"]},
    {"layers_to_transform": []},
    {"layers_to_transform": [0], "target_modules": ["v_proj", "model.layers.1.mlp.up_proj"]},
]


@pytest.mark.parametrize("settings", OF_MODULES, ids=str)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of some
def test_tensors_are_ignored_where_peft_ignores_them(
    tmp_path: Path, lora_modules: Shapes, settings: dict[str, Any]
) -> None:
    trained(LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=ALL)).save_pretrained(tmp_path)
    edit_settings(tmp_path, settings)
    checkpoint = read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    assert [module.name for module in checkpoint.modules] == loaded_by_peft(tmp_path)
    assert len(checkpoint.modules) + len(checkpoint.ignored) / 2 == len(lora_modules)


NAMES = [
    *(f"model.layers.{layer}.{name}" for layer in (0, 1, 11) for name in ALL),
    *("model.layers.1.mlp.experts.7.up_proj", "h.1.k_proj", "q_proj", "lm_head"),
    *("model.embed_tokens", "model.layers.q_proj", "model.layers.1"),
]


@pytest.mark.parametrize("saved", [[], ["mlp"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize(
    "settings",
    [
        *(each for each in OF_MODULES if str(each.get("target_modules")).lower() != "all-linear"),
        {"layers_to_transform": [1], "layers_pattern": "layers|h"},
    ],
    ids=str,
)
def test_any_name_is_matched_as_peft_matches_it(settings: dict[str, Any], saved: list[str]) -> None:
    told = {"target_modules": [*ALL, "embed_tokens"], "modules_to_save": saved, **settings}
    config, findings = LoraConfig(**told), list[str]()
    targets = parse_targets(told, tuple(saved), findings)
    meant = {name for name in NAMES if check_target_module_exists(config, name)}
    assert set(NAMES) - targets.without_lora(NAMES, findings) == meant
    assert not findings


@pytest.mark.filterwarnings("ignore")  # PEFT warns of both
def test_biases_of_lora_b_are_ignored_where_peft_makes_none(
    tmp_path: Path, lora_modules: Shapes
) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"], lora_bias=True)
    trained(config).save_pretrained(tmp_path)
    edit_settings(tmp_path, {"lora_bias": False})
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert not [name for name, _ in model.named_parameters() if name.endswith("lora_B.bias")]
    checkpoint = read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    assert not checkpoint.biases
    assert [name.rpartition("v_proj.")[2] for name in checkpoint.ignored] == ["lora_B.bias"] * 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target_modules": ["out_proj"]}, "none of its 28 tensors is of a module that its config"),
        ({"target_modules": []}, "none of its 28 tensors is of a module"),
        ({"exclude_modules": ALL}, "none of its 28 tensors is of a module"),
        ({"layers_to_transform": [7]}, "none of its 28 tensors is of a module"),
        (
            {"target_modules": ".*_proj", "layers_to_transform": [1]},
            "layers_to_transform is set, and target_modules is the expression '.*_proj', with",
        ),
        (
            {"layers_pattern": "layers"},
            "layers_pattern is 'layers' without layers_to_transform, which PEFT does not take",
        ),
        ({"target_modules": "(q_proj"}, "target_modules is '(q_proj', which is no expression: "),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_settings_of_modules_that_peft_refuses_are_refused(
    tmp_path: Path, lora_modules: Shapes, settings: dict[str, Any], told: str
) -> None:
    trained(LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=ALL)).save_pretrained(tmp_path)
    edit_settings(tmp_path, settings)
    with pytest.raises((ValueError, re.error)):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)
    assert told in str(error.value)
