from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lora_serve.config.model import AUTO, OWN_IMPL, TRANSFORMERS_IMPL
from lora_serve.errors import ConfigError
from lora_serve.models import weights
from lora_serve.models.base import ModelSpec
from lora_serve.models.checkpoints import safetensors
from lora_serve.models.finite import is_finite
from lora_serve.models.source import load_spec
from lora_serve.models.weights import RandomWeights, TensorSource, WeightReader, open_weights
from lora_serve.ops.quantization import FORMATS, QuantizedWeight
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.quantized_checkpoints import gptq, save_quantized
from tests.fakes.tiny_models import save

EMBEDDINGS = "model.embed_tokens.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(directories: dict[str, Path], tmp_path: Path) -> Path:
    """A Qwen2 directory that a test may break."""
    return shutil.copytree(directories["qwen2"], tmp_path / "model")


@pytest.fixture
def spec(directories: dict[str, Path]) -> ModelSpec:
    return load_spec(directories["qwen2"])


def open_model(directory: Path, spec: ModelSpec) -> TensorSource:
    return open_weights(directory, spec, "safetensors", 0, torch.float32)


def rewrite(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Change tensors of the file; None takes one away."""
    path = directory / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(path), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


def digest(source: TensorSource, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> bytes:
    reader = WeightReader(source, dtype)
    for name in spec.tensor_shapes():
        reader.take(name)
    return reader.digest()


def test_a_sharded_checkpoint_gives_the_same_tensors(
    tiny_models: dict[str, PreTrainedModel], model: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    sharded = save(tiny_models["qwen2"], tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert digest(open_model(sharded, spec), spec) == digest(open_model(model, spec), spec)


def test_tensors_are_converted_to_the_models_dtype(model: Path, spec: ModelSpec) -> None:
    stored = load_file(model / "model.safetensors")[Q_PROJ]
    taken = WeightReader(open_model(model, spec), torch.bfloat16).take(Q_PROJ)
    assert torch.equal(taken, stored.to(torch.bfloat16))


def test_a_file_that_changes_later_changes_nothing_that_was_read(
    model: Path, spec: ModelSpec
) -> None:
    taken = WeightReader(open_model(model, spec), torch.float32).take("model.norm.weight")
    before = taken.clone()
    with (model / "model.safetensors").open("r+b") as file:
        size = (model / "model.safetensors").stat().st_size
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    assert torch.equal(taken, before)


def test_the_digest_is_over_what_was_read(model: Path, spec: ModelSpec) -> None:
    before = digest(open_model(model, spec), spec)
    assert digest(open_model(model, spec), spec) == before
    assert digest(open_model(model, spec), spec, torch.bfloat16) != before
    changed = load_file(model / "model.safetensors")["model.norm.weight"]
    changed[3] += 1e-6
    rewrite(model, {"model.norm.weight": changed})
    assert digest(open_model(model, spec), spec) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tied_lm_head_in_the_file_that_is_the_embeddings_is_not_read(
    model: Path, spec: ModelSpec, dtype: torch.dtype
) -> None:
    """Also one of another type, if both are equal in the one that the model computes in."""
    before = digest(open_model(model, spec), spec)
    embeddings = load_file(model / "model.safetensors")[EMBEDDINGS]
    rewrite(model, {"lm_head.weight": embeddings.to(dtype)})
    if dtype == torch.bfloat16:
        with pytest.raises(ConfigError, match="differs from"):
            open_model(model, spec)
        open_weights(model, spec, "safetensors", 0, torch.bfloat16)
    else:
        assert digest(open_model(model, spec), spec) == before


@pytest.mark.parametrize("impl", [OWN_IMPL, TRANSFORMERS_IMPL])
def test_a_head_of_its_own_beside_tied_embeddings_is_refused_until_the_config_is_mended(
    model: Path, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes the stored head; so does the mended config."""
    monkeypatch.setattr(weights, "_AT_ONCE", 1000)
    head = load_file(model / "model.safetensors")[EMBEDDINGS].clone()
    head[-1, -1] += 3
    rewrite(model, {"lm_head.weight": head})
    with pytest.raises(ConfigError, match=rf"lm_head\.weight differs from {EMBEDDINGS}.*to false"):
        BareModel(model, REFERENCE, torch.float32, model_impl=impl)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, head)
    config = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config))
    ours = BareModel(model, REFERENCE, torch.float32, model_impl=impl)
    with torch.no_grad():
        expected = theirs(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(Prompt([3, 1, 4], [0]).alone(ours), expected, rtol=0, atol=1e-4)


def test_a_head_of_another_size_beside_tied_embeddings_is_refused(
    model: Path, spec: ModelSpec
) -> None:
    rewrite(model, {"lm_head.weight": torch.ones(130, 64)})
    with pytest.raises(ConfigError, match="tie_word_embeddings says that both are one"):
        open_model(model, spec)


def test_a_head_of_codes_beside_tied_embeddings_is_refused(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    save_quantized(tiny_models["qwen2"], directory, gptq(4, 32))
    parts, _ = gptq(4, 32).make(128, 64, np.random.default_rng(1))
    rewrite(directory, {f"lm_head.{part}": each.contiguous() for part, each in parts.items()})
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from"):
        open_weights(directory, load_spec(directory), AUTO, 0, torch.float32)


def test_buffers_that_old_checkpoints_hold_are_not_read(model: Path, spec: ModelSpec) -> None:
    rewrite(model, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    open_model(model, spec)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({Q_PROJ: None}, f"{Q_PROJ} is missing"),
        ({"model.extra": torch.ones(2)}, "model.extra is unexpected"),
        ({Q_PROJ: torch.ones(64, 32)}, "has shape (64, 32), the config says (64, 64)"),
        ({Q_PROJ: torch.ones(64, 64, dtype=torch.int8)}, "is stored as I8; supported are"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensors_name(
    model: Path, spec: ModelSpec, changes: dict[str, Tensor | None], told: str
) -> None:
    rewrite(model, changes)
    with pytest.raises(ConfigError) as error:
        open_model(model, spec)
    assert told in str(error.value)
    assert str(model) in str(error.value)


def test_of_many_findings_the_first_are_named_and_the_rest_counted(
    model: Path, spec: ModelSpec
) -> None:
    rewrite(model, dict.fromkeys(list(spec.tensor_shapes())[:20]))
    with pytest.raises(ConfigError, match="; and 12 more"):
        open_model(model, spec)


def test_a_missing_shard_is_named(
    tiny_models: dict[str, PreTrainedModel], spec: ModelSpec, tmp_path: Path
) -> None:
    sharded = save(tiny_models["qwen2"], tmp_path / "sharded", max_shard_size="100KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} is missing"):
        open_model(sharded, spec)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(model: Path, spec: ModelSpec, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="not an index"):
        open_model(model, spec)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", ".."])
def test_shards_elsewhere_than_beside_their_index_are_refused(
    model: Path, spec: ModelSpec, name: str
) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="name files that lie beside it alone"):
        open_model(model, spec)


def test_more_tensors_than_any_model_has_are_refused(
    model: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "MAX_TENSORS", len(spec.tensor_shapes()))
    open_model(model, spec)
    rewrite(model, {f"more.{number}": torch.zeros(1) for number in range(2)})
    with pytest.raises(ConfigError, match=r"has more than \d+ tensors, with the \d+ of model\.saf"):
        open_model(model, spec)


def test_a_truncated_file_is_refused(model: Path, spec: ModelSpec) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is broken"):
        open_model(model, spec)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    model: Path, spec: ModelSpec
) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safe_serialization=True"):
        open_model(model, spec)


def test_a_directory_without_weights_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        open_model(tmp_path, spec)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(
    value: float, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    weight = torch.tensor([largest, -largest, 0.0, -0.0] * 2**16, dtype=dtype).view(4, -1)
    assert is_finite(weight)
    for place in (0, 2**17 - 1, 2**17, weight.numel() - 1):
        broken = weight.clone()
        broken.view(-1)[place] = value
        assert not is_finite(broken), place


def test_what_has_no_values_or_no_floats_is_finite() -> None:
    assert is_finite(torch.empty(0, 3))
    assert is_finite(torch.tensor([-1], dtype=torch.int32))


def test_tensors_with_values_that_are_not_finite_are_named(model: Path, spec: ModelSpec) -> None:
    broken = load_file(model / "model.safetensors")[Q_PROJ]
    broken[-1, -1] = float("nan")
    rewrite(model, {Q_PROJ: broken})
    reader = WeightReader(open_model(model, spec), torch.bfloat16)
    for name in spec.tensor_shapes():
        reader.take(name)
    assert reader.broken == [Q_PROJ]


def test_codes_are_looked_at_by_their_scales(spec: ModelSpec) -> None:
    codes, scales = torch.ones(2, 32, dtype=torch.int8), torch.tensor([[1.0], [float("inf")]])

    class Codes(RandomWeights):
        def read_codes(self, name: str) -> QuantizedWeight:
            return QuantizedWeight(FORMATS["int8"], codes, scales)

    reader = WeightReader(Codes({}, 0, torch.float32), torch.float32, keeps_codes=True)
    reader.take_codes(Q_PROJ)
    assert reader.broken == [Q_PROJ]


def test_random_weights_need_only_a_config_and_a_seed(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    sources = [open_weights(tmp_path, spec, "dummy", seed, torch.bfloat16) for seed in (1, 1, 2)]
    first, again, other = (digest(source, spec, torch.bfloat16) for source in sources)
    assert first == again != other


def test_random_weights_have_the_size_of_trained_ones() -> None:
    source = RandomWeights({"a.weight": (3000, 500), "b.norm.weight": (8,)}, 0, torch.float32)
    weight = source.read("a.weight")
    assert weight.std().item() == pytest.approx(500**-0.5, rel=0.01)
    assert len(torch.unique(weight[:, 0])) > 2900
    assert torch.equal(source.read("b.norm.weight"), torch.ones(8))
