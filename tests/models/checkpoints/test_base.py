"""What every checkpoint format must pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lora_serve.config.model import CHECKPOINT_FORMATS, STORED_QUANTIZATIONS, ModelConfig
from lora_serve.errors import ConfigError
from lora_serve.models.checkpoints.base import CheckpointFormat
from lora_serve.models.checkpoints.choose import format_named, format_of
from lora_serve.models.source import check_quantization, load_spec
from lora_serve.models.weights import Checkpoint, open_weights
from tests.fakes.gguf_files import save_gguf
from tests.fakes.quantized_checkpoints import (
    Written,
    awq,
    compressed,
    fp8,
    gptq,
    nf4,
    save_mxfp4,
    save_quantized,
)
from tests.fakes.text_architectures import tiny_model
from tests.fakes.tiny_models import save

# Writes a model in a format, and says which floats it then stores: all, or what rounding left.
Writer = Callable[[PreTrainedModel, Path], Mapping[str, Tensor]]


def as_safetensors(model: PreTrainedModel, directory: Path) -> Mapping[str, Tensor]:
    save(model, directory, max_shard_size="100KB")
    return model.state_dict()


AUTO = ModelConfig().load_format


def as_gguf(model: PreTrainedModel, path: Path) -> Mapping[str, Tensor]:
    save_gguf(model, path)
    return model.state_dict()


def quantized(how: Written) -> Writer:
    return lambda model, directory: save_quantized(model, directory, how)


def as_mxfp4(_: PreTrainedModel, directory: Path) -> Mapping[str, Tensor]:
    return save_mxfp4(tiny_model("gpt_oss"), directory)


WRITERS: dict[str, Writer] = {
    "safetensors": as_safetensors,
    "gguf": as_gguf,
    "gptq": quantized(gptq(4, 32)),
    "awq": quantized(awq(32)),
    "compressed_tensors": quantized(compressed("pack-quantized", 4, 32)),
    "fp8": quantized(fp8(None)),
    "bitsandbytes": quantized(nf4(nested_block=16)),
    "mxfp4": as_mxfp4,
}


def files_of(checkpoint: Path) -> list[Path]:
    return [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())


@pytest.fixture(params=CHECKPOINT_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def form(name: str) -> CheckpointFormat:
    return format_named(name)


@pytest.fixture
def written(
    name: str, tiny_models: dict[str, PreTrainedModel], tmp_path: Path
) -> tuple[Path, Mapping[str, Tensor]]:
    """A checkpoint in the format, and the floats that it stores."""
    return tmp_path / "model", WRITERS[name](tiny_models["qwen2"], tmp_path / "model")


def test_a_directory_is_recognised_by_its_format_alone(
    form: CheckpointFormat, written: tuple[Path, Mapping[str, Tensor]], tmp_path: Path
) -> None:
    directory, _ = written
    recognised = [
        other for other in CHECKPOINT_FORMATS if format_named(other).recognises(directory)
    ]
    assert [format_named(other) for other in recognised] == [form]
    assert format_of(directory, AUTO) is form
    assert not form.recognises(tmp_path)


def test_its_method_may_be_named_and_no_other(
    name: str, written: tuple[Path, Mapping[str, Tensor]]
) -> None:
    for stated in STORED_QUANTIZATIONS:
        if stated.replace("-", "_") == name:
            check_quantization(written[0], AUTO, stated)
            continue
        told = f"--quantization {stated}: the weights of {written[0]} are {format_named(name).name}"
        with pytest.raises(ConfigError, match=f"{told}; leave the flag out, or .* int8 or int4"):
            check_quantization(written[0], AUTO, stated)


def test_its_files_are_among_those_fetched_from_the_hub(
    form: CheckpointFormat, written: tuple[Path, Mapping[str, Tensor]], tmp_path: Path
) -> None:
    directory, _ = written
    for path in files_of(directory):
        is_one_file = path == directory  # which the hub is asked for by its name
        if not is_one_file and not any(path.match(each) for each in ("*.json", *form.files)):
            path.unlink()
    spec = load_spec(directory)
    open_weights(directory, spec, AUTO, 0, torch.float32)


def test_it_gives_the_floats_that_were_stored(
    written: tuple[Path, Mapping[str, Tensor]],
) -> None:
    directory, stored = written
    spec = load_spec(directory)
    source = open_weights(directory, spec, AUTO, 0, torch.float32)
    for name in spec.tensor_shapes():
        assert torch.equal(source.read(name).to(stored[name].dtype), stored[name]), name


def test_a_tensor_that_was_read_is_memory_of_its_own(
    written: tuple[Path, Mapping[str, Tensor]],
) -> None:
    directory, _ = written
    spec = load_spec(directory)
    source = open_weights(directory, spec, AUTO, 0, torch.float32)
    first = source.read("model.norm.weight")
    first.zero_()
    assert source.read("model.norm.weight").any()
    kept = source.read("model.norm.weight").clone()
    held = source.read("model.norm.weight")
    for path in files_of(directory):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    assert torch.equal(held, kept)


def test_a_tensors_bytes_lie_where_it_says(
    form: CheckpointFormat, written: tuple[Path, Mapping[str, Tensor]]
) -> None:
    directory, _ = written
    for name, tensor in form.open(directory).tensors().items():
        for found in tensor.ranges:
            assert 0 <= found.begin < found.end <= found.path.stat().st_size, name


def test_a_file_that_is_cut_off_or_gone_is_refused_by_its_name(
    form: CheckpointFormat, written: tuple[Path, Mapping[str, Tensor]]
) -> None:
    directory, _ = written
    spec = load_spec(directory)
    (path, *_) = [path for path in files_of(directory) if path.match((*form.files, "*")[0])]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=path.name):
        Checkpoint(directory, form, spec.tensor_name)
    path.unlink()
    with pytest.raises(ConfigError, match=str(directory)):
        Checkpoint(directory, form, spec.tensor_name)


@pytest.mark.usefixtures("little_memory")
def test_a_file_that_is_cut_off_or_lies_of_its_header_is_refused(
    written: tuple[Path, Mapping[str, Tensor]],
) -> None:
    directory, _ = written
    path = max(files_of(directory), key=lambda file: file.stat().st_size)
    content = path.read_bytes()
    lies = [(2**power).to_bytes(8, "little") + content[8:] for power in (27, 40, 63)]
    cut_off = [content[:end] for end in (0, 4, 8, 100, len(content) // 2, len(content) - 1)]
    for broken in (*lies, *cut_off):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=str(directory)):
            open_weights(directory, load_spec(directory), AUTO, 0, torch.float32)


@pytest.mark.usefixtures("little_memory")
def test_changed_bytes_of_a_header_are_read_or_refused_and_nothing_else(
    written: tuple[Path, Mapping[str, Tensor]],
) -> None:
    directory, _ = written
    path = max(files_of(directory), key=lambda file: file.stat().st_size)
    content, rng, num_refused = path.read_bytes(), random.Random(4), 0
    for _ in range(60):
        changed = bytearray(content)
        changed[rng.randrange(3000)] = rng.choice((0, 1, 0x31, 0x7F, 0x80, 0xFF))
        path.write_bytes(changed)
        try:
            spec = load_spec(directory)
            source = open_weights(directory, spec, AUTO, 0, torch.float32)
            for name in spec.tensor_shapes():
                source.read(name)
        except ConfigError:
            num_refused += 1
    assert num_refused > 10
