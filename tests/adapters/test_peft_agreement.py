"""What PEFT saves is read with the delta that PEFT itself computes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lora_serve.adapter_checkpoint import RawTensor
from lora_serve.adapters.checkpoint import read_adapter
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
