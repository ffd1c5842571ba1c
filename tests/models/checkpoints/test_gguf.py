from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lora_serve.config.model import AUTO
from lora_serve.errors import ConfigError
from lora_serve.gguf.header import read_header
from lora_serve.gguf.types import TENSOR_TYPES
from lora_serve.layers.rotary import LinearScaling, LongRopeScaling, RopeSpec, YarnScaling
from lora_serve.models.base import ModelSpec
from lora_serve.models.checkpoints.ggml_blocks import BLOCK_TYPES
from lora_serve.models.checkpoints.gguf import FORMAT
from lora_serve.models.checkpoints.gguf_families import FAMILIES
from lora_serve.models.dense import DenseSpec
from lora_serve.models.gemma import GemmaSpec
from lora_serve.models.source import load_spec, model_path
from lora_serve.models.weights import open_weights
from lora_serve.ops.cpu.ggml_blocks import NativeBlocks
from lora_serve.ops.reference import REFERENCE
from tests.fakes.bare_model import BareModel, Prompt
from tests.fakes.gguf_files import all_f32, save_gguf
from tests.fakes.tiny_models import GEMMA, TINY_MODELS, YARN_ROPE, TinyModel, save

NAMES = (
    *("llama", "llama-bias-yarn", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "granite"),
    *("olmo2", "olmo3", "phi3", "phi4", "glm4", "cohere", "cohere-plus", "cohere2"),
    "starcoder2",
    *("mixtral", "olmoe", "qwen2-moe", "qwen3-moe"),
)
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SUPPORTED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
WIDE = TinyModel(
    LlamaConfig,
    LlamaForCausalLM,
    {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
)


def tiny(name: str) -> PreTrainedModel:
    return TINY_MODELS[name].make()


@pytest.mark.parametrize("name", NAMES)
def test_a_familys_file_gives_what_its_checkpoint_does(
    name: str, tiny_models: dict[str, PreTrainedModel], directories: dict[str, Path], tmp_path: Path
) -> None:
    path = save_gguf(tiny_models[name], tmp_path / "model.gguf")
    spec, expected = load_spec(path), load_spec(directories[name])
    if name in ("llama", "phi4"):  # whose factors of frequencies are stored in float32
        (table,), (saved_table,) = spec.rotary_tables(8), expected.rotary_tables(8)
        torch.testing.assert_close(table, saved_table, atol=1e-4, rtol=0)
        assert isinstance(spec, DenseSpec)
        assert isinstance(expected, DenseSpec)
        assert isinstance(spec.rope.scaling, LongRopeScaling)
        expected = replace(expected, rope=spec.rope)
    assert spec == as_a_file_can_say(expected, name)
    source = open_weights(path, spec, AUTO, 0, torch.float32)
    stored = open_weights(directories[name], expected, AUTO, 0, torch.float32)
    for tensor in spec.tensor_shapes():
        # 1 was added to Gemma's norms, and their last bits went with it.
        is_rounded = name.startswith("gemma") and "norm" in tensor
        tolerance = {"atol": 2e-7, "rtol": 0.0} if is_rounded else {"atol": 0.0, "rtol": 0.0}
        torch.testing.assert_close(source.read(tensor), stored.read(tensor), **tolerance)


def test_a_granites_file_has_a_matrix_of_each_expert(
    tiny_models: dict[str, PreTrainedModel], directories: dict[str, Path], tmp_path: Path
) -> None:
    """Its own checkpoint has one of all; the answers are those of the same numbers."""
    model, prompt = tiny_models["granite-moe"], Prompt(list(range(40)), range(4))
    of_file, of_own = (
        prompt.alone(BareModel(path, REFERENCE, torch.float32))
        for path in (save_gguf(model, tmp_path / "m.gguf"), directories["granite-moe"])
    )
    assert torch.equal(of_file, of_own)
    quantised = save_gguf(model, tmp_path / "q8.gguf", lambda name: GgmlType.Q8_0)
    kept = BareModel(quantised, REFERENCE, torch.float32, keeps_codes=True)
    assert sum(".experts." in name for name in kept.kept_codes) == 30


def as_a_file_can_say(spec: ModelSpec, name: str) -> ModelSpec:
    """The facts without those that converters leave out, which llama.cpp knows of the models."""
    if isinstance(spec, GemmaSpec):
        return replace(spec, attention_scale=GEMMA["head_dim"] ** -0.5)
    assert isinstance(spec, DenseSpec)
    match name:
        case "smollm3":
            return replace(spec, unrotated=())
        case "cohere2":
            return replace(spec, windows=(spec.windows[0],) * spec.num_layers, unrotated=())
        case "starcoder2":
            return replace(spec, windows=(None,) * spec.num_layers)
    return spec


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_dequantised_to_the_bit_as_by_the_formats_own_package(name: str) -> None:
    num_bytes = {each.name: each.num_bytes for each in TENSOR_TYPES.values()}[name]
    blocks = np.random.default_rng(5).integers(0, 256, (3000, num_bytes), np.uint8)
    with np.errstate(invalid="ignore"):  # random scales are also infinities and NaNs
        expected = gguf.quants.dequantize(blocks, GgmlType[name])
        found = BLOCK_TYPES[name].apart(blocks).dequantized()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_native_code_takes_blocks_apart_to_the_bits_of_the_specification(name: str) -> None:
    """But for which NaN a NaN is: random scales are also infinities and NaNs."""
    (kind,) = (each for each in TENSOR_TYPES.values() if each.name == name)
    shape, block_type, native = (3000, kind.values), BLOCK_TYPES[name], NativeBlocks()
    blocks = np.random.default_rng(7).integers(0, 256, (shape[0], kind.num_bytes), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        kept, weights = block_type.kept(blocks), block_type.apart(blocks).dequantized()
    codes, groups = torch.empty(shape, dtype=torch.int8), kind.values // block_type.form.group
    scales = torch.empty(shape[0], groups)
    offsets = torch.empty_like(scales) if block_type.has_offsets else None
    native.unpack(name, blocks, codes, scales, offsets)
    np.testing.assert_array_equal(codes, kept.codes.reshape(shape))
    np.testing.assert_array_equal(scales, kept.scales.reshape(scales.shape))
    assert (kept.offsets is None) == (offsets is None)
    if offsets is not None and kept.offsets is not None:
        np.testing.assert_array_equal(offsets, kept.offsets.reshape(scales.shape))
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        values, expected = torch.empty(shape, dtype=dtype), torch.from_numpy(weights).to(dtype)
        native.dequantize(name, blocks, values)
        is_nan = expected.isnan()
        assert torch.equal(values.isnan(), is_nan)
        assert torch.equal(values.view(bits)[~is_nan], expected.view(bits)[~is_nan])


def test_blocks_that_native_code_does_not_know_are_refused() -> None:
    native, blocks = NativeBlocks(), np.zeros((1, 18), np.uint8)
    with pytest.raises(ValueError, match="no blocks of the type 'Q4_9' are known"):
        native.dequantize("Q4_9", blocks, torch.empty(32))
    with pytest.raises(ValueError, match="blocks become float32 or bfloat16"):
        native.dequantize("Q4_0", blocks, torch.empty(32, dtype=torch.float16))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_codes_that_are_kept_are_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """They are, to the float32 to which an offset is rounded; q's rows in the family's order."""
    path = save_gguf(WIDE.make(), tmp_path / "m.gguf", lambda _: GgmlType[name])
    source = FORMAT.open(path)
    for tensor in ("self_attn.q_proj", "mlp.down_proj"):
        codes = source.read_codes(f"model.layers.1.{tensor}.weight")
        assert codes is not None
        form = codes.format
        assert (form.name, form.bits) == (name, 4 if name.startswith("Q4") else 8)
        assert form.least <= int(codes.codes.min())
        assert int(codes.codes.max()) <= form.most
        expected = source.read(f"model.layers.1.{tensor}.weight")
        atol = 0.0 if codes.offsets is None else 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(codes.dequantized(), expected, atol=atol, rtol=0)
    assert source.read_codes("model.norm.weight") is None


def test_the_table_of_types_is_the_formats() -> None:
    known = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in GgmlType
        if kind in gguf.GGML_QUANT_SIZES
    }
    ours = {key: (each.name, each.values, each.num_bytes) for key, each in TENSOR_TYPES.items()}
    assert {key: known[key] for key in ours if key in known} == {
        key: each for key, each in ours.items() if key in known
    }
    assert set(SUPPORTED) == set(FORMAT.dtypes)


def test_a_file_of_every_type_is_read_as_its_own_package_reads_it(tmp_path: Path) -> None:
    def type_of(name: str) -> GgmlType:
        *_, layer, matrix, _ = ("0", *name.split("."))
        if matrix not in MATRICES:
            return GgmlType.Q6_K
        return GgmlType[SUPPORTED[(MATRICES.index(matrix) + 4 * int(layer)) % len(SUPPORTED)]]

    path = save_gguf(WIDE.make(), tmp_path / "m.gguf", type_of)
    spec = load_spec(path)
    assert spec.dtype == "bfloat16"
    source = open_weights(path, spec, AUTO, 0, torch.float32)
    assert source.described == f"GGUF ({', '.join(sorted(SUPPORTED))})"
    entries = read_header(path).tensors
    for tensor in gguf.GGUFReader(path).tensors:
        ((name, _),) = FAMILIES["llama"].parts(tensor.name, entries[tensor.name], 0)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
            *reversed(tensor.shape.tolist())
        )
        read = source.read(name).float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = 4 if "q_proj" in name else 2
            # Row 2 i + h of a head is row i of its half h.
            rows = expected.reshape(heads, -1, 2, expected.shape[-1])
            expected = rows.transpose(0, 2, 1, 3).reshape(expected.shape)
        np.testing.assert_array_equal(read, expected)


def test_experts_are_the_parts_of_one_tensor(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    def type_of(name: str) -> GgmlType:
        return (
            GgmlType.Q8_0
            if name.endswith(("gate_exps.weight", "up_exps.weight"))
            else all_f32(name)
        )

    path = save_gguf(tiny_models["qwen2-moe"], tmp_path / "m.gguf", type_of)
    source = open_weights(path, load_spec(path), AUTO, 0, torch.float32)
    stored = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for theirs, ours in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        tensor = stored[f"blk.1.ffn_{theirs}_exps.weight"]
        experts = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for index, expected in enumerate(experts):
            name = f"model.layers.1.mlp.experts.{index}.{ours}.weight"
            np.testing.assert_array_equal(source.read(name).numpy(), expected)


def test_other_experts_than_the_metadata_says_are_refused(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    path = save_gguf(tiny_models["olmoe"], tmp_path / "m.gguf")
    written = path.read_bytes()
    count = b"olmoe.expert_count" + (4).to_bytes(4, "little")
    assert written.count(count + (5).to_bytes(4, "little")) == 1
    at = written.index(count) + len(count)
    path.write_bytes(written[:at] + (4).to_bytes(4, "little") + written[at + 4 :])
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj\.weight is missing"):
        open_weights(path, load_spec(path), AUTO, 0, torch.float32)


@pytest.mark.parametrize(
    ("kind", "family", "dtype"),
    [
        (GgmlType.F32, "qwen2", "float32"),
        (GgmlType.F16, "qwen2", "float16"),
        (GgmlType.F16, "gemma2", "bfloat16"),
        (GgmlType.BF16, "qwen2", "bfloat16"),
        (GgmlType.Q8_0, "qwen2", "bfloat16"),
    ],
)
def test_a_model_computes_in_its_matrices_type_or_in_bfloat16(
    kind: GgmlType, family: str, dtype: str, tmp_path: Path
) -> None:
    path = save_gguf(tiny(family), tmp_path / "m.gguf", lambda name: kind)
    assert load_spec(path).dtype == dtype


def test_everything_that_is_not_supported_is_told_at_once(tmp_path: Path) -> None:
    path = save_gguf(
        WIDE.make(),
        tmp_path / "m.gguf",
        lambda name: GgmlType.IQ4_NL if "ffn" in name else GgmlType.Q3_K,
        **{"attention.max_alibi_bias": 8, "attention.key_length": 33},
    )
    with pytest.raises(ConfigError) as refused:
        load_spec(path)
    told = str(refused.value)
    assert told.startswith(f"{path}: 6 tensors are of the type IQ4_NL, which is not supported")
    assert "10 tensors are of the type Q3_K" in told
    assert "llama.attention.max_alibi_bias of 8 is not supported" in told
    assert "keys of size 33 and values of size 64 are not equal" in told


def rope_of(path: Path) -> RopeSpec:
    spec = load_spec(path)
    assert isinstance(spec, DenseSpec)
    return spec.rope


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 4.0}, LinearScaling(4.0)),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, LinearScaling(2.0)),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
        ({}, None),
    ],
)
def test_a_factor_without_a_kind_scales_linearly_as_in_llama_cpp(
    metadata: dict[str, float | str], scaling: LinearScaling | None, tmp_path: Path
) -> None:
    path = save_gguf(tiny("qwen2"), tmp_path / "m.gguf", **metadata)
    assert rope_of(path) == RopeSpec(10000.0, scaling)


def test_yarns_amplitude_is_the_models_own(tmp_path: Path) -> None:
    """The config of transformers that the file was made of has the same."""
    stated = {"attention_factor": 0.75, "beta_fast": 24.0, "beta_slow": 2.0}
    options = {"rope_parameters": YARN_ROPE | stated}
    model = TinyModel(LlamaConfig, LlamaForCausalLM, options).make()
    rope = rope_of(save_gguf(model, tmp_path / "m.gguf"))
    assert rope == rope_of(save(model, tmp_path / "model"))
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == 0.75


@pytest.mark.parametrize(
    ("name", "metadata", "told"),
    [
        # Linear beside Llama 3's factors, which the file has as a tensor.
        ("llama", {"rope.scaling.factor": 4.0}, "llama.rope.scaling.factor of 4.0"),
        # Of scalings of other kinds.
        ("llama-bias-yarn", {"rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor"),
        ("qwen2", {"rope.scaling.yarn_attn_factor": 2.0}, "qwen2.rope.scaling.yarn_attn_factor"),
        ("llama-bias-yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor of 0.5"),
        ("qwen2", {"attention.sliding_window": 64}, "qwen2.attention.sliding_window of 64"),
        # llama.cpp does not rotate then.
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned of False"),
        ("qwen2", {"attention.of_a_later_year": 2}, "qwen2.attention.of_a_later_year of 2"),
        ("olmoe", {"expert_group_count": 2}, "olmoe.expert_group_count of 2"),
        ("qwen2", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step of 2"),
    ],
)
def test_metadata_that_would_change_the_arithmetic_is_refused(
    name: str, metadata: dict[str, float | bool], told: str, tmp_path: Path
) -> None:
    path = save_gguf(tiny(name), tmp_path / "m.gguf", **metadata)
    with pytest.raises(ConfigError, match=re.escape(told) + ".* is not supported"):
        load_spec(path)


def test_all_keys_of_the_format_that_change_arithmetic_are_heeded_or_refused(
    tmp_path: Path,
) -> None:
    """The names are those of the format's own package."""
    keys = gguf.Keys
    named = {
        key.removeprefix("{arch}.")
        for part in (keys.LLM, keys.Attention, keys.Attention.Indexer, keys.Rope)
        for key in vars(part).values()
        if isinstance(key, str) and key.startswith("{arch}.")
    }
    pattern = r"attention\.|rope\.|expert_|.*_scale$|.*_softcapping$"
    arithmetic = {key for key in named if re.match(pattern, key)}
    heeded = {
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.value_length", "attention.layer_norm_epsilon"),
        *("attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern"),
        *("expert_used_count", "expert_feed_forward_length", "expert_weights_norm"),
        *("expert_shared_feed_forward_length", "expert_group_used_count"),
        *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
    assert heeded < arithmetic
    others = dict.fromkeys(arithmetic - heeded, 7)
    assert len(others) > 30
    path = save_gguf(tiny("qwen2"), tmp_path / "m.gguf", **others)
    with pytest.raises(ConfigError) as refused:
        load_spec(path)
    assert {key for key in others if f"qwen2.{key} of 7 is not" in str(refused.value)} == {*others}


def test_olmo_3_has_one_rotary_base_where_the_file_is_silent(tmp_path: Path) -> None:
    path = save_gguf(tiny("olmo3"), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b".rope.freq_base_swa", b".none.freq_base_swa"))
    spec = load_spec(path)
    assert isinstance(spec, DenseSpec)
    assert spec.windowed_rope == RopeSpec(spec.rope.theta)


def test_metadata_that_changes_nothing_is_no_fault(tmp_path: Path) -> None:
    plain: dict[str, float | bool] = {
        "attention.causal": True,
        "attention.sliding_window": 0,
        "expert_weights_scale": 1.0,
        "rope.scaling.finetuned": False,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    path = save_gguf(tiny("qwen2"), tmp_path / "m.gguf", **plain)
    assert rope_of(path) == RopeSpec(10000.0)


def test_an_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_type("adapter")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"no model but a 'adapter'.*'mamba' is not supported in"):
        load_spec(tmp_path / "m.gguf")


def test_missing_metadata_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"qwen2\.context_length is missing.*token_embd\.weight, a"
    ):
        load_spec(tmp_path / "m.gguf")


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    model = tiny("qwen2")
    path = save_gguf(model, tmp_path / "m.gguf")
    renamed = path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight")
    path.write_bytes(renamed)
    with pytest.raises(ConfigError) as refused:
        open_weights(path, load_spec(path), AUTO, 0, torch.float32)
    assert "model.layers.1.self_attn.q_proj.weight is missing" in str(refused.value)
    assert "blk.1.attn_z.weight is unexpected" in str(refused.value)


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), -1.0])
def test_factors_of_frequencies_must_be_positive(factor: float, tmp_path: Path) -> None:
    path = save_gguf(tiny("llama"), tmp_path / "m.gguf")
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    begin = int(tensors["rope_freqs.weight"].data_offset)
    content = bytearray(path.read_bytes())
    content[begin : begin + 4] = np.float32(factor).tobytes()
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="short_factor must be a list of positive numbers"):
        load_spec(path)


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = save_gguf(tiny("qwen2"), tmp_path / "m.gguf", lambda name: GgmlType.Q8_0)
    source = FORMAT.open(path)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ConfigError, match="became shorter while it was read"):
        source.read("model.layers.2.mlp.down_proj.weight")


def test_a_gguf_file_is_no_other_format(tmp_path: Path) -> None:
    path = save_gguf(tiny("qwen2"), tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="a GGUF file, not --load-format safetensors"):
        model_path(str(path), None, "safetensors", with_weights=True)
    assert model_path(str(path), None, "dummy", with_weights=False) == path
