from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lora_serve.config.model import OWN_IMPL
from lora_serve.errors import ConfigError
from lora_serve.models.registry import ARCHITECTURES, read_spec
from lora_serve.models.source import load_spec
from tests.fakes.tiny_models import TINY_MODELS
from tests.models.configs import LLAMA, read

# Beside a vision tower, which no tiny model has; tests/models/test_gemma.py compares it.
COMPARED_ALONE = {"Gemma3ForConditionalGeneration"}


def test_each_architecture_has_a_tiny_model_that_is_compared_with_transformers() -> None:
    compared = {tiny.model_class.__name__ for tiny in TINY_MODELS.values()} | COMPARED_ALONE
    without = set(ARCHITECTURES) - compared
    assert not without, f"add tiny checkpoints of {without} to tests/fakes/tiny_models.py"
    assert compared == set(ARCHITECTURES)


def test_the_model_type_of_each_architecture_is_that_of_transformers() -> None:
    theirs = {
        **{name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()},
        "Gemma3ForConditionalGeneration": "gemma3",
        "Gemma3ForCausalLM": "gemma3_text",
    }
    ours = {name: model_type for name, (_, model_type) in ARCHITECTURES.items()}
    assert ours == {name: theirs[name] for name in ours}


def test_a_model_type_of_another_family_is_refused(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """transformers would compute that family: of Qwen2 a config of Llama has no biases."""
    path = shutil.copytree(directories["qwen2"], tmp_path / "model") / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "llama"}
    path.write_text(json.dumps(config))
    assert isinstance(AutoConfig.from_pretrained(path.parent), LlamaConfig)
    with pytest.raises(ConfigError) as refused:
        load_spec(path.parent)
    assert str(refused.value) == (
        f"{path}: model_type is 'llama', and architectures names Qwen2ForCausalLM, whose "
        "model_type is 'qwen2'; correct the one that is wrong"
    )
    path.write_text(json.dumps(config | {"model_type": "of_a_fork"}))
    assert load_spec(path.parent) == load_spec(directories["qwen2"])


def test_an_unsupported_architecture_is_answered_with_those_supported() -> None:
    with pytest.raises(ConfigError) as told:
        read_spec({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "c.json", OWN_IMPL)
    assert "GPT2LMHeadModel" in str(told.value)
    assert all(name in str(told.value) for name in ARCHITECTURES)
    with pytest.raises(ConfigError, match="none named"):
        read(architectures=None)
    with pytest.raises(ConfigError, match=r"\['LlamaForCausalLM'\] is not supported"):
        read(architectures=[["LlamaForCausalLM"]])


def test_quantised_checkpoints_are_refused_with_all_else_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as told:
        read(quantization_config={"bits": 4}, mlp_bias=True)
    assert str(told.value) == (
        "c.json: quantised checkpoints are not supported (quantization_config is set); "
        "mlp_bias is not supported"
    )


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "decoder_layers", "num_experts"])
def test_no_memory_is_taken_for_layers_and_experts_that_no_model_has(key: str) -> None:
    deep: dict[str, object] = {key: 10**12}
    for _ in range(2000):
        deep = {"text_config": deep}
    for changes in ({key: 10**12}, deep):
        with pytest.raises(ConfigError, match=f"{key} is 1000000000000, the most is 4096"):
            read(architectures=["Qwen2MoeForCausalLM"], **changes)
    types = [[["global"], 10**12]]
    with pytest.raises(ConfigError, match="attention_types is 1000000000000, the most is 4096"):
        read(architectures=["GPTNeoForCausalLM"], attention_types=types)
    with pytest.raises(ConfigError, match="4096 layers of 4096 experts are more than 262144"):
        read(num_hidden_layers=4096, num_local_experts=4096)
