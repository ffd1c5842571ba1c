from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from lora_serve.adapters.tensor_file import TensorFile, TensorSpec
from tests.fakes.adapter_files import StoredTensor, header_of, random_tensor, safetensors_bytes

TENSORS = {"a": random_tensor((2, 3), 1), "b": random_tensor((4,), 2, "BF16")}


def headers(content: bytes, path: Path) -> tuple[dict[str, TensorSpec] | None, list[str]]:
    findings: list[str] = []
    path.write_bytes(content)
    with path.open("rb") as file:
        return TensorFile(file).read_header(findings), findings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensors"


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_says_where_each_tensor_lies(path: Path) -> None:
    specs, findings = headers(safetensors_bytes(TENSORS), path)
    assert specs == {
        "a": TensorSpec("F32", (2, 3), 0, 24),
        "b": TensorSpec("BF16", (4,), 24, 32),
    }
    assert not findings


def test_files_of_the_safetensors_library_are_read(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    saved = {
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(3, 5).bfloat16(),
        "full": torch.randn(3, 5),
    }
    save_file(saved, path, metadata={"format": "pt"})
    findings: list[str] = []
    with path.open("rb") as handle:
        file = TensorFile(handle)
        specs = file.read_header(findings)
        assert specs is not None
        tensors = file.read_tensors(specs, findings)
    assert not findings
    for name, tensor in saved.items():
        assert tensors[name].data == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert tensors[name].shape == (3, 5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x07",
        (100).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_header_longer_than_the_file_is_a_finding(path: Path, content: bytes) -> None:
    specs, (finding,) = headers(content, path)
    assert specs is None
    assert finding.startswith(f"the safetensors file is truncated or none: {len(content)} bytes")


def test_a_header_longer_than_the_limit_is_told_from_a_truncated_file(path: Path) -> None:
    specs, (finding,) = headers((9 * 2**20).to_bytes(8, "little") + b" " * 9 * 2**20, path)
    assert specs is None
    assert finding == (
        "the safetensors file has a header of more than 8388608 bytes, the most of an adapter; "
        "save it without metadata, or with fewer tensors"
    )


@pytest.mark.parametrize("header", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}'])
def test_a_header_that_is_no_object_is_a_finding(path: Path, header: bytes) -> None:
    specs, (finding,) = headers(safetensors_bytes({}, header), path)
    assert specs is None
    assert finding.startswith("the safetensors header")


@pytest.mark.parametrize(
    "broken",
    [
        7,
        {},
        entry(1, [6], [0, 24]),
        entry("F32", 6, [0, 24]),
        entry("F32", [6], [0]),
        entry("F32", [6], [0, 24, 24]),
        entry("F32", [6], 24),
        entry("F32", [6.0], [0, 24]),
        entry("F32", [True, 6], [0, 24]),
        entry("F32", [-6], [0, 24]),
        entry("F32", [6], [-24, 0]),
        entry("F32", [2**63], [0, 24]),
        entry("F32", [1] * 9, [0, 4]),
        entry("F32", [6], [0, 24]) | {"more": 1},
    ],
)
def test_a_description_that_is_none_is_a_finding(path: Path, broken: object) -> None:
    specs, (finding,) = headers(safetensors_bytes({"a": TENSORS["a"]}, {"a": broken}), path)
    assert specs is None
    assert finding.startswith("tensor 'a' is described as ")


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "f32", ""])
def test_other_dtypes_are_a_finding(path: Path, dtype: str) -> None:
    specs, (finding,) = headers(safetensors_bytes({}, {"a": entry(dtype, [0], [0, 0])}), path)
    assert specs is None
    assert finding == f"tensor 'a' has dtype {dtype!r}; save it as one of F32, F16, BF16"


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([7], [0, 24]), ([6], [24, 0]), ([2**62, 2**62], [0, 24]), ([0, 2**62], [0, 24])],
)
def test_bytes_that_do_not_fit_the_shape_are_a_finding(
    path: Path, shape: list[int], offsets: list[int]
) -> None:
    header = {"a": entry("F32", shape, offsets)}
    specs, (finding,) = headers(safetensors_bytes({"a": TENSORS["a"]}, header), path)
    assert specs is None
    assert "cannot have" in finding


@pytest.mark.parametrize(
    ("a", "b", "finding"),
    [
        ([0, 24], [16, 24], "tensor 'b' begins at byte 16 of the data, not at 24"),
        ([0, 24], [0, 8], "tensor 'a' begins at byte 0 of the data, not at 8"),
        ([8, 32], [24, 32], "tensor 'a' begins at byte 8 of the data, not at 0"),
        ([0, 24], [2**40, 2**40 + 8], f"tensor 'b' begins at byte {2**40} of the data, not at 24"),
    ],
)
def test_overlaps_and_gaps_are_a_finding(
    path: Path, a: list[int], b: list[int], finding: str
) -> None:
    header = {"a": entry("F32", [2, 3], a), "b": entry("BF16", [4], b)}
    specs, (found,) = headers(safetensors_bytes(TENSORS, header), path)
    assert specs is None
    assert found == f"{finding}: the file has overlaps or gaps"


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_than_its_tensors_is_a_finding(path: Path, change: int) -> None:
    content = safetensors_bytes(TENSORS)
    content = content[:change] if change < 0 else content + b"\0"
    specs, (finding,) = headers(content, path)
    assert specs is None
    assert finding.endswith(f"its header describes 32 bytes of tensors, it holds {32 + change}")


def test_empty_tensors_lie_between_others(path: Path) -> None:
    tensors = {"a": TENSORS["a"], "empty": StoredTensor("F16", (0, 3), b""), "b": TENSORS["b"]}
    specs, findings = headers(safetensors_bytes(tensors), path)
    assert not findings
    assert specs is not None
    assert specs["empty"] == TensorSpec("F16", (0, 3), 24, 24)


def test_a_file_that_is_written_to_while_it_is_read_is_a_finding(path: Path) -> None:
    path.write_bytes(safetensors_bytes(TENSORS))
    findings: list[str] = []
    with path.open("rb") as handle:
        file = TensorFile(handle)
        specs = file.read_header(findings)
        assert specs is not None
        os.utime(path, ns=(1, 1))  # as a writer's next write would
        file.read_tensors(specs, findings)
    assert len(findings) == 1
    assert findings[0].startswith("the safetensors file was written to while it was read")


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(path: Path) -> None:
    path.write_bytes(safetensors_bytes(TENSORS))
    findings: list[str] = []
    with path.open("rb") as handle:
        file = TensorFile(handle)
        specs = file.read_header(findings)
        assert specs is not None
        other = path.with_suffix(".new")
        other.write_bytes(safetensors_bytes({"a": random_tensor((2, 3), 9), "b": TENSORS["b"]}))
        os.replace(other, path)
        tensors = file.read_tensors(specs, findings)
    assert not findings
    assert tensors["a"].data == TENSORS["a"].data


class ShortFile(io.FileIO):
    """A file system that gives less than it promised."""

    def readinto(self, buffer: object) -> int:
        return super().readinto(memoryview(buffer)[:-1])  # type: ignore[arg-type]


def test_a_read_that_ends_early_is_a_finding(path: Path) -> None:
    path.write_bytes(safetensors_bytes(TENSORS))
    findings: list[str] = []
    with ShortFile(path) as handle:
        file = TensorFile(handle)  # type: ignore[arg-type]
        specs = file.read_header(findings)
        assert specs is not None
        file.read_tensors(specs, findings)
    assert len(findings) == 1
    assert "while it was read" in findings[0]


def test_the_metadata_is_no_tensor(path: Path) -> None:
    header = header_of(TENSORS.items()) | {"__metadata__": {"made": "by hand"}}
    specs, _ = headers(safetensors_bytes(TENSORS, header), path)
    assert specs is not None
    assert set(specs) == {"a", "b"}
