from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from lora_serve import file_identity
from lora_serve.errors import ConfigError
from lora_serve.gguf.header import MAX_HEADER_BYTES, MAX_LISTED, forget_header, read_header

_START = b"GGUF" + struct.pack("<I", 3)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*, tensors: bytes = b"", values: bytes = b"", counts: tuple[int, int]) -> bytes:
    return _START + struct.pack("<QQ", *counts) + values + tensors


def tensor(
    name: bytes = b"t", sizes: tuple[int, ...] = (32,), kind: int = 8, offset: int = 0
) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("f", 0.5)
    writer.add_float64("d", -2.5)
    writer.add_int8("i", -3)
    writer.add_uint64("u", 2**63)
    writer.add_bool("b", True)
    writer.add_string("s", "naïve")
    writer.add_array("texts", ["a", "", "b c"])
    writer.add_array("flags", [True, False])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("a", np.zeros((3, 5), np.float32))
    writer.add_tensor("b", np.zeros(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "m.gguf"


def test_values_and_tensors_are_as_they_were_written(written: Path) -> None:
    read = read_header(written)
    values = {key: read.metadata[key] for key in ("f", "d", "i", "u", "b", "s")}
    assert values == {"f": 0.5, "d": -2.5, "i": -3, "u": 2**63, "b": True, "s": "naïve"}
    assert read.metadata["texts"] == ["a", "", "b c"]
    assert read.metadata["flags"] == [True, False]
    assert read.metadata["numbers"] == [1, -2, 3]
    theirs = {each.name: each for each in gguf.GGUFReader(written).tensors}
    for name, entry in read.tensors.items():
        assert entry.shape == tuple(reversed(theirs[name].shape.tolist()))
        assert entry.type_name == theirs[name].tensor_type.name
        assert (entry.begin, entry.end - entry.begin) == (
            theirs[name].data_offset,
            theirs[name].n_bytes,
        )


def test_a_header_is_read_once_as_long_as_its_file_is_the_same(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", -1.0)
    first = read_header(written)
    assert read_header(written) is first
    written.write_bytes(written.read_bytes())
    second = read_header(written)
    assert second == first
    assert second is not first
    forget_header()
    assert read_header(written) is not second
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 3600.0)
    assert read_header(written) is not read_header(written)


def test_a_file_that_is_cut_off_anywhere_is_refused(written: Path) -> None:
    content = written.read_bytes()
    last = read_header(written).tensors["b"].end
    for end in range(0, last, 7):
        written.write_bytes(content[:end])
        with pytest.raises(ConfigError, match=str(written)):
            read_header(written)


_KEY = text(b"k")
HOSTILE = {
    "another format": (b"\x80\x04pickle", "this is no GGUF file: it begins with"),
    "an empty file": (b"", "this is no GGUF file: it begins with b''"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported, 2 and"),
    "a later version": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "GGUF version 4 is not supported"),
    "the other order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is in big-endian order"),
    "more tensors than bytes": (header(counts=(2**60, 0)), "asks for 1,152,921,504,606,846,976 t"),
    "more values than bytes": (header(counts=(0, 2**63)), "metadata values where 0 bytes are left"),
    "a long key": (
        header(counts=(0, 1), values=struct.pack("<Q", 2**40) + bytes(9)),
        "a name of 1,099,511,627,776 bytes is above the 65,535",
    ),
    "a long text": (
        header(counts=(0, 1), values=_KEY + struct.pack("<IQ", 8, 2**62)),
        "asks for 4,611,686,018,427,387,904 bytes where 0",
    ),
    "a long list of texts": (
        header(counts=(0, 1), values=_KEY + struct.pack("<IIQ", 9, 8, 2**61)),
        "2,305,843,009,213,693,952 texts of 'k' where 0",
    ),
    "a list whose text is long": (
        header(counts=(0, 1), values=_KEY + struct.pack("<IIQQ", 9, 8, 1, 2**61)),
        "a text of 2,305,843,009,213,693,952 bytes",
    ),
    "a long list of numbers": (
        header(counts=(0, 1), values=_KEY + struct.pack("<IIQ", 9, 12, 2**61)),
        "2,305,843,009,213,693,952 values of 'k'",
    ),
    "a list of lists": (
        header(counts=(0, 1), values=_KEY + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)),
        "'k' is of the unknown type 9",
    ),
    "an unknown type of value": (
        header(counts=(0, 1), values=_KEY + struct.pack("<I", 13)),
        "'k' is of the unknown type 13",
    ),
    "no UTF-8": (
        header(counts=(0, 1), values=_KEY + struct.pack("<I", 8) + text(b"\xff\xfe")),
        "is not UTF-8",
    ),
    "a value twice": (
        header(counts=(0, 2), values=2 * (_KEY + struct.pack("<IBxxx", 0, 1))[:-3]),
        "the metadata has 'k' twice",
    ),
    "an odd alignment": (
        header(counts=(0, 1), values=text(b"general.alignment") + struct.pack("<II", 4, 33)),
        "alignment must be a power of two, is 33",
    ),
    "no alignment": (
        header(counts=(0, 1), values=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "alignment must be a power of two, is 0",
    ),
    "a tensor beyond the file": (
        header(counts=(1, 0), tensors=tensor(sizes=(32, 2**50))),
        "the file is cut off, download it again",
    ),
    "an offset beyond the file": (
        header(counts=(1, 0), tensors=tensor(offset=2**63)),
        "'t' ends at byte 9,223,372,036,854,775,",
    ),
    "sizes whose product overflows": (
        header(counts=(1, 0), tensors=tensor(sizes=(2**32, 2**32, 2**32, 32))),
        "the file is cut off",
    ),
    "an offset that is not aligned": (
        header(counts=(1, 0), tensors=tensor(offset=1)) + bytes(256),
        "the tensor 't' lies at 1, not a multiple of 32",
    ),
    "two tensors in one place": (
        header(counts=(2, 0), tensors=tensor(b"a", (64,)) + tensor(b"b", offset=32)) + bytes(256),
        "the tensors 'a' and 'b' have bytes in common",
    ),
    "five dimensions": (
        header(counts=(1, 0), tensors=tensor(sizes=(32, 1, 1, 1, 1))),
        "'t' has 5 dimensions",
    ),
    "no dimensions": (header(counts=(1, 0), tensors=tensor(sizes=())), "of shape () cannot be"),
    "a tensor of nothing": (
        header(counts=(1, 0), tensors=tensor(sizes=(32, 0, 2**62))),
        "of shape (4611686018427387904, 0, 32) cannot be",
    ),
    "half a block": (
        header(counts=(1, 0), tensors=tensor(sizes=(33,)) + bytes(99)),
        "of shape (33,) cannot be Q8_0, whose blocks have 32 values",
    ),
    "an unknown type": (
        header(counts=(1, 0), tensors=tensor(kind=99)),
        "'t' has the type 99, which is not known here; it may be of a later llama.cpp",
    ),
    "a tensor twice": (
        header(counts=(2, 0), tensors=2 * tensor() + bytes(99)),
        "the tensor 't' is there twice",
    ),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_lying_header_is_one_clear_error(what: str, tmp_path: Path) -> None:
    content, told = HOSTILE[what]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_header(tmp_path / "m.gguf")
    assert told in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_header_larger_than_any_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(header(counts=(0, 1), values=_KEY + struct.pack("<IIQ", 9, 0, 2**28)))
        file.truncate(MAX_HEADER_BYTES + 2**28)
    with pytest.raises(ConfigError, match="the header goes beyond 134,217,728 bytes"):
        read_header(path)


def test_more_tensors_than_any_model_has_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header(counts=(2**16 + 1, 0), tensors=bytes(2**21)))
    with pytest.raises(ConfigError, match="has 65,537 tensors, above the 65,536 of any model"):
        read_header(tmp_path / "m.gguf")


@pytest.mark.usefixtures("little_memory")
def test_lists_of_more_items_than_any_models_are_refused(tmp_path: Path) -> None:
    """Such as 50 million numbers of two bytes, each of which would be an object here."""
    half = MAX_LISTED // 2 + 1
    lists = b"".join(text(key) + struct.pack("<IIQ", 9, 3, half) + bytes(2 * half)
                     for key in (b"a", b"b"))  # fmt: skip
    (tmp_path / "m.gguf").write_bytes(header(counts=(0, 2), values=lists))
    with pytest.raises(ConfigError, match=r"its lists have 8,388,610 items, above the 8,388,608"):
        read_header(tmp_path / "m.gguf")


def test_changed_bytes_are_read_or_refused_and_nothing_else(written: Path) -> None:
    content, rng = written.read_bytes(), random.Random(4)
    refused = []
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(content) // 2)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        written.write_bytes(changed)
        try:
            read_header(written)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(written) in told for told in refused)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_header(tmp_path)
