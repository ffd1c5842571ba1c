from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lora_serve.config.model import AUTO
from lora_serve.errors import ConfigError
from lora_serve.models.checkpoints.choose import format_of
from lora_serve.models.checkpoints.fp8 import Fp8
from lora_serve.models.checkpoints.quantized_safetensors import QuantizedSafetensors
from lora_serve.models.checkpoints.safetensors import FORMAT as SAFETENSORS
from lora_serve.models.checkpoints.safetensors import OpenSafetensors
from lora_serve.models.source import load_spec
from lora_serve.models.weights import open_weights
from tests.fakes.quantized_checkpoints import (
    Written,
    awq,
    compressed,
    fp8,
    gptq,
    llm_int8,
    mixed,
    nf4,
    save_mxfp4,
    save_quantized,
)
from tests.fakes.text_architectures import tiny_model

# With the group of the codes that kernels get, if they are kept.
KINDS: dict[str, tuple[Written, int | None]] = {
    "gptq-4": (gptq(4, 32), 32),
    "gptq-4-symmetric": (gptq(4, 16, symmetric=True), 16),
    "gptq-8": (gptq(8, 32, symmetric=True), 32),
    "gptq-v2": (gptq(4, 32, version="gptq_v2"), 32),
    "gptq-act-order": (gptq(4, 32, act_order=True), None),
    "gptq-groups-of-8": (gptq(4, 8), None),
    "awq": (awq(32), 32),
    "w4a16": (compressed("pack-quantized", 4, 32), 32),
    "w4a16-zero-points": (compressed("pack-quantized", 4, 32, symmetric=False), 32),
    "w8a16": (compressed("pack-quantized", 8, None), 128),
    "w8a8": (compressed("int-quantized", 8, None), 128),
    "w4a8": (compressed("int-quantized", 4, 32), 32),
    "w4a8-zero-points": (compressed("int-quantized", 4, 32, symmetric=False), 32),
    "compressed-fp8-blocks": (
        compressed("float-quantized", 8, None, block=(48, 32)),
        None,
    ),
    "compressed-fp8": (compressed("float-quantized", 8, None), None),
    "fp8-blocks": (fp8((32, 16)), None),
    "fp8-tensors": (fp8(None), None),
    "fp8-one-large-block": (fp8((10**12, 10**12)), None),
    "nf4": (nf4(), None),
    "nf4-double": (nf4(nested_block=16), None),
    "nf4-blocks-beyond-rows": (nf4(4096, nested_block=256), None),
    "llm-int8": (llm_int8(), 128),
}


def inverse_fp8() -> Written:
    """FP8 whose config says that scales divide; `make` does not."""
    how = fp8(None)
    return Written({**how.settings, "weight_scale_semantics": "inverse"}, how.make)


HADAMARD = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
OF_NO_BLOCK = {"num_bits": 8, "strategy": "block", "block_structure": [0, 32]}
WITH_ZEROS = ("w4a8-zero-points", "gptq-4", "gptq-v2", "awq", "w4a16-zero-points")


def test_a_scheme_is_recognised_by_the_name_that_it_has_itself(tmp_path: Path) -> None:
    class NewScheme(Fp8):
        method = "new"

    config = {"quantization_config": {"quant_method": "new"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert QuantizedSafetensors(NewScheme()).recognises(tmp_path)
    assert not SAFETENSORS.recognises(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(
    kind: str, tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> tuple[Path, Mapping[str, Tensor]]:
    directory = tmp_path / "model"
    return directory, save_quantized(tiny_models["qwen2"], directory, KINDS[kind][0])


def test_weights_are_those_that_the_format_defines(
    kind: str, saved: tuple[Path, Mapping[str, Tensor]]
) -> None:
    directory, expected = saved
    spec, group = load_spec(directory), KINDS[kind][1]
    source = open_weights(directory, spec, AUTO, 0, torch.float32)
    for name in spec.tensor_shapes():
        assert torch.equal(source.read(name), expected[name]), name
        codes = source.read_codes(name)
        assert (codes is not None) == (group is not None and name.endswith("_proj.weight"))
        if codes is not None:
            assert codes.format.group == group
            assert int(codes.codes.min()) >= codes.format.least
            assert torch.equal(codes.dequantized(), expected[name])
            assert (codes.offsets is not None) == (kind in WITH_ZEROS)


@pytest.mark.parametrize(
    ("how", "settings", "told"),
    [
        (
            gptq(4, 32),
            {"bits": 3, "checkpoint_format": "marlin"},
            "bits of 3 .*; checkpoint_format",
        ),
        (gptq(4, 32), {"group_size": "big"}, "group_size must be a whole number"),
        (
            awq(32),
            {"version": "gemv", "bits": 8},
            "bits of 8 are not supported; 4.*; version 'gemv",
        ),
        (compressed("pack-quantized", 4, 32), {"format": "marlin-24"}, "format 'marlin-24' is not"),
        (compressed("pack-quantized", 4, 32), {"config_groups": {}}, "is missing or empty"),
        (
            compressed("pack-quantized", 4, 32),
            {"transform_config": {"config_groups": {"u": HADAMARD, "v": HADAMARD}}},
            "transform_config is not supported: weights are stored transformed, by u, v; take a",
        ),
        (
            compressed("float-quantized", 8, None),
            {"config_groups": {"group_0": {"weights": OF_NO_BLOCK}}},
            r"block_structure must be two whole numbers, is \[0, 32\]",
        ),
        (
            mixed(compressed("pack-quantized", 4, 32), compressed("int-quantized", 6, 32)),
            {},
            "num_bits of 6 are not supported in int-quantized",
        ),
        (fp8(None), {"weight_block_size": [128]}, r"must be two whole numbers, is \[128\]"),
        (fp8(None), {"weight_block_size": [True, True]}, r"numbers, is \[True, True\]"),
        (fp8(None), {"weight_scale_semantics": "log"}, "weight_scale_semantics 'log' is not"),
        (awq(32), {"quant_method": "aqlm"}, "quantised checkpoints are not supported"),
        (nf4(), {"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit must be true"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_together(
    how: Written,
    settings: dict[str, Any],
    told: str,
    tiny_models: dict[str, PreTrainedModel],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "model"
    save_quantized(tiny_models["qwen2"], directory, how)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= settings
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=told):
        load_spec(directory)


INTEGERS_4, INTEGERS_8 = (compressed("int-quantized", bits, None) for bits in (4, 8))
PACKED_4, PACKED_8 = (compressed("pack-quantized", bits, 32) for bits in (4, 8))


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        (mixed(PACKED_4, PACKED_8), {4, 8}),
        (mixed(PACKED_4, compressed("float-quantized", 8, None)), {4, None}),
        # The tensors of 4 bits have the shapes of 8 bits of half as many inputs.
        (mixed(compressed("pack-quantized", 8, 16), PACKED_4), {8, 4}),
        (mixed(INTEGERS_8, compressed("float-quantized", 8, None)), {8, None}),
        # Nothing tells these apart, and 8 bits hold numbers of 4.
        (mixed(INTEGERS_4, INTEGERS_8), {8}),
    ],
)  # fmt: skip
def test_each_weight_has_the_settings_that_its_tensors_fit(
    how: Written, bits: set[int | None], tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    expected = save_quantized(tiny_models["qwen2"], directory, how)
    spec = load_spec(directory)
    source = open_weights(directory, spec, AUTO, 0, torch.float32)
    found = set[int | None]()
    for name in spec.tensor_shapes():
        assert torch.equal(source.read(name), expected[name]), name
        if name.endswith("_proj.weight"):
            codes = source.read_codes(name)
            found.add(codes.format.bits if codes else None)
    assert found == bits


def test_opening_reads_no_weight_to_choose_its_settings(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, read = tmp_path / "model", list[str]()
    kinds = mixed(INTEGERS_8, compressed("float-quantized", 8, None))
    save_quantized(tiny_models["qwen2"], directory, kinds)
    real = OpenSafetensors.read

    def noted(self: OpenSafetensors, name: str) -> Tensor:
        read.append(name)
        return real(self, name)

    monkeypatch.setattr(OpenSafetensors, "read", noted)
    format_of(directory, AUTO).open(directory)
    assert not read


def test_scales_of_a_kv_cache_are_passed_over(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    save_quantized(tiny_models["qwen2"], directory, fp8(None))
    tensors = load_file(directory / "model.safetensors")
    for name in ("k_scale", "v_scale"):
        tensors[f"model.layers.1.self_attn.{name}"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors")
    open_weights(directory, load_spec(directory), AUTO, 0, torch.float32)


def test_weights_whose_parts_lack_or_do_not_fit_are_all_named(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    save_quantized(tiny_models["qwen2"], directory, gptq(4, 32))
    tensors = load_file(directory / "model.safetensors")
    first, second = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"
    del tensors[f"{first}.qzeros"]
    tensors[f"{second}.scales"] = tensors[f"{second}.scales"][:, 1:].contiguous()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError) as refused:
        format_of(directory, AUTO).open(directory)
    assert f"{first}.weight: qzeros is missing" in str(refused.value)
    assert f"{second}.weight: scales has shape (2, 63), not (2, 64)" in str(refused.value)


@pytest.mark.parametrize(
    ("how", "part", "stored", "told"),
    [
        (gptq(4, 32), "qweight", torch.ones(8, 64), "qweight is stored as F32, not I32"),
        (gptq(4, 32), "qweight", torch.ones(0, 64).int(), r"qweight of shape \(0, 64\) is empty"),
        (awq(32), "scales", torch.ones(2, 64).int(), "scales is stored as I32, not F32 or F16 or"),
        (fp8(None), "weight", torch.ones(64, 64), "weight is stored as F32, not F8_E4M3 or F8_E5"),
        (nf4(), "weight", torch.ones(2048, 1), "weight is stored as F32, not U8 or I8"),
        (nf4(), "weight.absmax", torch.ones(64).byte(), "weight.absmax is stored as torch.uint8, "),
        (nf4(), "weight.quant_map", torch.ones(15), r"weight.quant_map has shape \(15,\), not"),
        (llm_int8(), "SCB", torch.ones(1), r"SCB has shape \(1,\), not \(64,\)"),
        (llm_int8(), "weight_format", torch.tensor(2).byte(), "weight_format 2 is a layout of"),
        (
            llm_int8(),
            "weight",
            torch.ones(64, 64).byte(),
            r"weight is stored as torch\.uint8, ",
        ),
        (
            compressed("float-quantized", 8, None),
            "weight",
            torch.ones(64, 64).char(),
            r"weight is torch\.int8, which float-quantized has not",
        ),
        (
            compressed("int-quantized", 8, 32, symmetric=False),
            "weight_zero_point",
            torch.ones(2, 64).char(),
            r"weight_zero_point has shape \(2, 64\), not \(64, 2\)",
        ),
        (
            compressed("float-quantized", 8, None),
            "weight_zero_point",
            torch.ones(64, 1).char(),
            "weight_zero_point is not 0, which is not supported in float-quantized",
        ),
        (inverse_fp8(), "weight_scale", torch.zeros(64, 1), "weight_scale has a scale of 0, by"),
    ],
)
def test_a_part_of_another_type_or_of_nothing_is_refused(
    how: Written,
    part: str,
    stored: Tensor,
    told: str,
    tiny_models: dict[str, PreTrainedModel],
    tmp_path: Path,
) -> None:
    directory, name = tmp_path / "model", "model.layers.1.self_attn.q_proj"
    save_quantized(tiny_models["qwen2"], directory, how)
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{name}.{part}"] = stored
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name}\.weight: {told}"):
        format_of(directory, AUTO).open(directory).read(f"{name}.weight")


def test_a_group_that_is_not_there_is_an_error(
    tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    save_quantized(tiny_models["qwen2"], directory, gptq(4, 32, act_order=True))
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.g_idx"][5] = 2
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name}\.weight: g_idx names groups beyond the 2"):
        format_of(directory, AUTO).open(directory).read(f"{name}.weight")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (b"[" * 4000, "its quant_state is not JSON"),
        (b"[]", "its quant_state is no JSON object"),
        (bytes(5000), r"has shape \(5000,\), which no state has"),
        (b'{"blocksize": 0, "shape": [64]}', "blocksize must be a whole .*; shape must be that of"),
        (b'{"blocksize": 64, "shape": [64, 1e99]}', "shape must be that of a matrix"),
        (
            b'{"blocksize": 64, "shape": [65536, 65536]}',
            r"weight has shape \(2048, 1\), not \(2147",
        ),
        (b'{"blocksize": 9999, "shape": [64, 64]}', "blocksize is 9999, the most is 4096"),
        (
            b'{"blocksize": 64, "shape": [64, 64], "nested_offset": NaN, "nested_blocksize": 8}',
            "nested_offset must be a number, is nan",
        ),
        (
            b'{"blocksize": 64, "shape": [64, 64], "nested_offset": 0, "nested_blocksize": 8}',
            r"weight.nested_absmax, weight.nested_quant_map is missing",
        ),
    ],
)
def test_a_state_that_no_weight_has_is_refused(
    state: bytes, told: str, tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    directory, name = tmp_path / "model", "model.layers.1.self_attn.q_proj.weight"
    save_quantized(tiny_models["qwen2"], directory, nf4())
    tensors = load_file(directory / "model.safetensors")
    bytes_of_state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = bytes_of_state
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}: .*{told}"):
        format_of(directory, AUTO).open(directory)


@pytest.mark.parametrize(
    ("part", "stored", "told"),
    [
        ("blocks", None, "its _blocks are missing"),
        ("scales", None, "its _scales are missing"),
        ("scales", torch.ones(4, 64, 1).byte(), r"have shape \(4, 64, 1\), not \(4, 64, 3\)"),
        ("scales", torch.ones(4, 64, 3), "its _scales are stored as F32, not as U8"),
        ("blocks", torch.ones(4, 64, 3, 8).byte(), r"not \(experts, out, groups, 16\)"),
        ("blocks", torch.ones(4, 0, 3, 16).byte(), r"its _blocks have shape \(4, 0, 3, 16\)"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(
    part: str, stored: Tensor | None, told: str, tmp_path: Path
) -> None:
    directory, name = tmp_path / "model", "model.layers.1.mlp.experts.down_proj"
    save_mxfp4(tiny_model("gpt_oss"), directory)
    tensors = load_file(directory / "model.safetensors")
    assert tensors[f"{name}_scales"].shape == (4, 64, 3)
    del tensors[f"{name}_{part}"]
    if stored is not None:
        tensors[f"{name}_{part}"] = stored
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name}: .*{told}"):
        format_of(directory, AUTO).open(directory)
