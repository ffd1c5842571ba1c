from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.adapters import directory
from lora_serve.adapters.checkpoint import check_adapter, digest, read_adapter
from lora_serve.adapters.vocabulary import RowsInFile, RowsKind
from lora_serve.errors import AdapterError, AdapterFormatError, AdapterNotFoundError
from tests.adapters.conftest import Shapes
from tests.fakes.adapter_files import (
    StoredTensor,
    lora_tensors,
    random_tensor,
    safetensors_bytes,
    write_adapter,
)
from tests.fakes.checkpoints import whole_checkpoint

Q0 = "model.layers.0.self_attn.q_proj"
DOWN1 = "model.layers.1.mlp.down_proj"
Read = Callable[..., AdapterCheckpoint]


@pytest.fixture
def read(tmp_path: Path, lora_modules: Shapes) -> Read:
    """Write a checkpoint of these tensors and settings, and read it."""

    def write_and_read(
        tensors: Mapping[str, StoredTensor],
        settings: Mapping[str, object] | None = None,
        *,
        at: str = "adapter",
        max_lora_rank: int = 8,
    ) -> AdapterCheckpoint:
        path = write_adapter(tmp_path / at, tensors, settings)
        return read_adapter(path, lora_modules=lora_modules, max_lora_rank=max_lora_rank)

    return write_and_read


@pytest.fixture
def findings(read: Read) -> Callable[..., list[str]]:
    """What reading refuses such a checkpoint for."""

    def refused(*args: object, **settings: object) -> list[str]:
        with pytest.raises(AdapterFormatError) as error:
            read(*args, **settings)
        return error.value.findings

    return refused


Findings = Callable[..., list[str]]


def some(lora_modules: Shapes, *names: str) -> Shapes:
    return {name: lora_modules[name] for name in names}


# ── what is read ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_checkpoint_holds_the_bytes_of_its_file(
    read: Read, lora_modules: Shapes, dtype: str
) -> None:
    tensors = lora_tensors(lora_modules, dtype=dtype)
    checkpoint = read(tensors)
    assert [module.name for module in checkpoint.modules] == sorted(lora_modules)
    for module in checkpoint.modules:
        for side, tensor in (("A", module.a), ("B", module.b)):
            stored = tensors[f"base_model.model.{module.name}.lora_{side}.weight"]
            assert (tensor.dtype, tensor.shape) == (stored.dtype, stored.shape)
            assert tensor.data == stored.data
            assert tensor.data.readonly
    assert checkpoint.num_bytes == sum(len(tensor.data) for tensor in tensors.values())
    assert (checkpoint.rank, checkpoint.base_model) == (4, "tiny")


def test_any_subset_of_the_projections_is_an_adapter(read: Read, lora_modules: Shapes) -> None:
    checkpoint = read(lora_tensors(some(lora_modules, Q0, DOWN1)))
    assert [module.name for module in checkpoint.modules] == [Q0, DOWN1]


def test_tensor_names_need_no_prefix(read: Read, lora_modules: Shapes) -> None:
    bare = read(lora_tensors(lora_modules, prefix=""), at="bare")
    assert bare.digest == read(lora_tensors(lora_modules)).digest


def test_scale_is_alpha_over_rank(read: Read, lora_modules: Shapes) -> None:
    checkpoint = read(lora_tensors(lora_modules), {"lora_alpha": 6})
    assert {module.scale for module in checkpoint.modules} == {1.5}


def test_rslora_scales_by_the_root_of_the_rank(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules, rank=5)
    checkpoint = read(tensors, {"r": 5, "lora_alpha": 6, "use_rslora": True})
    assert {module.scale for module in checkpoint.modules} == {6 / math.sqrt(5)}


def test_patterns_give_modules_their_own_rank_and_alpha(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(some(lora_modules, Q0)) | lora_tensors(some(lora_modules, DOWN1), rank=2)
    settings = {"rank_pattern": {"layers.1.*": 2}, "alpha_pattern": {"q_proj": 3.0}}
    q, down = read(tensors, settings).modules
    assert (q.rank, q.scale) == (4, 0.75)
    assert (down.rank, down.scale) == (2, 4.0)


def test_left_out_settings_have_pefts_defaults(
    tmp_path: Path, read: Read, lora_modules: Shapes
) -> None:
    path = write_adapter(tmp_path / "old", lora_tensors(lora_modules, rank=8))
    Path(path, "adapter_config.json").write_text('{"peft_type": "LORA"}')
    checkpoint = read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)
    assert {(module.rank, module.scale) for module in checkpoint.modules} == {(8, 1.0)}


def test_replacing_the_file_leaves_what_was_read(
    tmp_path: Path, read: Read, lora_modules: Shapes
) -> None:
    checkpoint = read(lora_tensors(lora_modules, seed=1))
    before = bytes(checkpoint.modules[0].a.data)
    write_adapter(tmp_path / "adapter", lora_tensors(lora_modules, seed=2))
    assert checkpoint.modules[0].a.data == before


# ── the digest ──────────────────────────────────────────────────────────────────────────────


def test_equal_bytes_at_another_path_have_one_digest(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules)
    assert read(tensors, at="here").digest == read(tensors, at="there").digest


def test_other_bytes_at_the_same_path_have_another_digest(read: Read, lora_modules: Shapes) -> None:
    digests = {read(lora_tensors(lora_modules, seed=seed)).digest for seed in range(3)}
    assert len(digests) == 3


def test_one_flipped_bit_changes_the_digest(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules)
    before = read(tensors).digest
    name = next(iter(tensors))
    data = bytearray(tensors[name].data)
    data[0] ^= 1
    tensors[name] = StoredTensor("F32", tensors[name].shape, bytes(data))
    assert read(tensors).digest != before


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 1}},
        {"lora_alpha": -8},
    ],
)
def test_whatever_changes_the_delta_changes_the_digest(
    read: Read, lora_modules: Shapes, settings: dict[str, object]
) -> None:
    tensors = lora_tensors(lora_modules)
    assert read(tensors, settings).digest != read(tensors).digest


def test_rank_is_in_the_digest_even_where_bytes_and_scale_agree(
    read: Read, lora_modules: Shapes
) -> None:
    # The same bytes as F16 of rank 8 and as F32 of rank 4; both scales are 2.
    wide = lora_tensors(some(lora_modules, Q0), rank=8, dtype="F16")
    narrow = {
        name: StoredTensor("F32", (4, 16) if "lora_A" in name else (16, 4), tensor.data)
        for name, tensor in wide.items()
    }
    settings = {"r": 8, "lora_alpha": 16}
    assert read(wide, settings).digest != read(narrow, at="narrow").digest


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 8.0},
        {"task_type": None, "lora_dropout": 0.1, "peft_version": "0.21.2", "inference_mode": True},
        {"target_modules": "all-linear", "base_model_name_or_path": "another"},
        {"r": 16, "lora_alpha": 2, "rank_pattern": {".*_proj": 4}, "alpha_pattern": {".*_proj": 8}},
        {"lora_alpha": 4, "use_rslora": True},
    ],
)
def test_the_same_delta_written_otherwise_has_the_same_digest(
    read: Read, lora_modules: Shapes, settings: dict[str, object]
) -> None:
    tensors = lora_tensors(lora_modules)
    assert read(tensors, settings).digest == read(tensors).digest


def test_the_order_in_the_file_is_not_in_the_digest(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules)
    backwards = dict(reversed(tensors.items()))
    assert read(backwards, at="backwards").digest == read(tensors).digest


def test_which_module_a_pair_belongs_to_is_in_the_digest(read: Read, lora_modules: Shapes) -> None:
    gate, up = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    of_gate = lora_tensors(some(lora_modules, gate))
    of_up = {name.replace(gate, up): tensor for name, tensor in of_gate.items()}
    assert read(of_gate).digest != read(of_up).digest


def tensor_of(data: bytes, shape: tuple[int, ...] = (4, 4), dtype: str = "F32") -> RawTensor:
    return RawTensor(dtype, shape, memoryview(data))


MODULE = LoRAModule("q_proj", 4, 2.0, tensor_of(bytes(64)), tensor_of(bytes(63) + b"x"))


@pytest.mark.parametrize(
    "other",
    [
        replace(MODULE, name="k_proj"),
        replace(MODULE, rank=5),
        replace(MODULE, scale=math.nextafter(2.0, 3.0)),
        replace(MODULE, a=MODULE.b, b=MODULE.a),
        replace(MODULE, a=MODULE.b),
        replace(MODULE, b=MODULE.a),
        replace(MODULE, a=tensor_of(bytes(64), dtype="F16")),
        replace(MODULE, b=tensor_of(bytes(63) + b"x", shape=(2, 8))),
        replace(MODULE, a=tensor_of(bytes(65)), b=tensor_of(bytes(62) + b"x")),
    ],
)
def test_a_digest_that_ignored_any_one_part_would_be_noticed(other: LoRAModule) -> None:
    assert digest((MODULE,)) == digest((replace(MODULE),))
    assert digest((MODULE,)) != digest((other,))


# Of these two adapters may differ and be one version. rank: the highest of the modules'.
NOT_DIGESTED = {"path", "digest", "rank", "num_bytes", "base_model", "ignored"}


def changed_once(value: Any) -> Iterator[Any]:
    """Values like this one, each with one thing changed somewhere in it."""
    match value:
        case int() | float():
            yield value + 1
        case str():
            yield f"{value}_other"
        case memoryview():
            yield memoryview(bytes([value[0] ^ 1]) + bytes(value[1:]))
        case tuple():
            yield ()
            yield from ((other, *value[1:]) for other in changed_once(value[0]))
        case _ if is_dataclass(value):
            for field in fields(value):
                for other in changed_once(getattr(value, field.name)):
                    yield replace(value, **{field.name: other})


def digest_of(adapter: AdapterCheckpoint) -> bytes:
    stored = [
        (RowsInFile(rows.name, "", RowsKind.TOKENS, rows.token_ids), rows.rows)
        for rows in adapter.token_rows
    ]
    return digest(adapter.modules, adapter.invocation_tokens, stored, adapter.biases)


@pytest.mark.parametrize(
    "name", [field.name for field in fields(AdapterCheckpoint) if field.name not in NOT_DIGESTED]
)
def test_whatever_an_adapter_has_is_in_the_digest_or_is_named_as_not(name: str) -> None:
    """Two adapters that differ in it would be one version otherwise, and share KV."""
    adapter = whole_checkpoint()
    others = [replace(adapter, **{name: other}) for other in changed_once(getattr(adapter, name))]
    assert others
    assert len({*map(digest_of, others), digest_of(adapter)}) == len(others) + 1


def test_how_many_modules_there_are_is_in_the_digest() -> None:
    other = replace(MODULE, name="k_proj")
    assert len({digest(()), digest((MODULE,)), digest((other,)), digest((MODULE, other))}) == 4
    assert digest((MODULE, other)) == digest((other, MODULE))


# ── what is refused ─────────────────────────────────────────────────────────────────────────


def test_all_findings_are_listed_at_once(findings: Findings, lora_modules: Shapes) -> None:
    tensors = lora_tensors(some(lora_modules, Q0), rank=16)
    tensors["base_model.model.lm_head.lora_A.weight"] = random_tensor((16, 16), 1)
    found = "; ".join(
        findings(tensors, {"r": 16, "use_dora": True, "bias": "x", "modules_to_save": ["x"]})
    )
    for part in ("use_dora", "bias is 'x'", "modules_to_save", "lm_head", "max_lora_rank 8"):
        assert part in found


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.lora_B.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.weight",
        f"base_model.model.{Q0}.lora_magnitude_vector",
        "base_model.model.model.layers.0.input_layernorm.bias",
        f"base_model.model.{Q0}.lora_A.default.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "",
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused_by_name(
    findings: Findings, lora_modules: Shapes, name: str
) -> None:
    tensors = lora_tensors(lora_modules) | {name: random_tensor((4, 16), 7)}
    (finding,) = findings(tensors)
    assert repr(name) in finding
    assert "down_proj" in finding


def test_a_checkpoint_without_tensors_is_never_the_base_model_in_disguise(
    findings: Findings,
) -> None:
    (finding,) = findings({})
    assert "base model" in finding


def test_half_a_pair_is_refused(findings: Findings, lora_modules: Shapes) -> None:
    tensors = lora_tensors(some(lora_modules, Q0, DOWN1))
    del tensors[f"base_model.model.{Q0}.lora_A.weight"]
    (finding,) = findings(tensors)
    assert f"{Q0}.lora_A" in finding


def test_a_pair_under_two_spellings_is_refused(findings: Findings, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules) | lora_tensors(some(lora_modules, Q0), prefix="")
    assert f"lora_A of {Q0} stands there twice" in findings(tensors)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [((4, 15), (16, 4)), ((4, 16), (16, 3)), ((5, 16), (16, 5))]
)
def test_shapes_must_fit_the_model_and_the_config(
    findings: Findings, shape_a: tuple[int, int], shape_b: tuple[int, int]
) -> None:
    tensors = {
        f"{Q0}.lora_A.weight": random_tensor(shape_a, 1),
        f"{Q0}.lora_B.weight": random_tensor(shape_b, 2),
    }
    (finding,) = findings(tensors)
    assert "shapes that do not fit" in finding


def test_many_wrong_shapes_make_one_short_finding(findings: Findings, lora_modules: Shapes) -> None:
    (finding,) = findings(lora_tensors(lora_modules), {"r": 2})
    assert "and 24 more" in finding


def test_a_rank_above_the_limit_is_refused(
    read: Read, findings: Findings, lora_modules: Shapes
) -> None:
    tensors = lora_tensors(lora_modules, rank=8)
    assert read(tensors, {"r": 8}).rank == 8
    assert findings(tensors, {"r": 8}, max_lora_rank=7) == [
        "LoRA rank 8 is greater than max_lora_rank 7; raise --max-lora-rank, or retrain"
    ]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "bf16"])
def test_values_that_are_not_finite_are_refused(
    findings: Findings, lora_modules: Shapes, value: float, dtype: str
) -> None:
    tensors = lora_tensors(lora_modules)
    name = f"base_model.model.{Q0}.lora_B.weight"
    values = np.ones((16, 4), dtype="<f4")
    values[3, 2] = value
    data = {
        "<f4": StoredTensor("F32", (16, 4), values.tobytes()),
        "<f2": StoredTensor("F16", (16, 4), values.astype("<f2").tobytes()),
        "bf16": StoredTensor("BF16", (16, 4), (values.view("<u4") >> 16).astype("<u2").tobytes()),
    }
    tensors[name] = data[dtype]
    (finding,) = findings(tensors)
    assert finding == f"infinite or NaN values in {name!r}; training has diverged"


def test_the_largest_finite_value_is_served(read: Read, lora_modules: Shapes) -> None:
    tensors = lora_tensors(some(lora_modules, Q0))
    largest = np.full((16, 4), np.finfo("<f4").max, dtype="<f4")
    tensors[f"base_model.model.{Q0}.lora_B.weight"] = StoredTensor(
        "F32", (16, 4), largest.tobytes()
    )
    assert read(tensors).rank == 4


# ── what is checked without reading tensors ─────────────────────────────────────────────────


@pytest.mark.parametrize("settings", [{}, {"r": 8}, {"use_dora": True}, {"rank_pattern": {"q": 9}}])
def test_a_check_refuses_what_reading_refuses(
    tmp_path: Path, lora_modules: Shapes, settings: Mapping[str, object]
) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules), settings)
    limits = {"lora_modules": lora_modules, "max_lora_rank": 4}
    assert findings_of(check_adapter, path, **limits) == findings_of(read_adapter, path, **limits)


def test_a_check_reads_no_tensor(tmp_path: Path, lora_modules: Shapes) -> None:
    tensors = lora_tensors(lora_modules)
    name = next(iter(tensors))
    nan = np.full(tensors[name].shape, np.nan, np.float32)
    tensors[name] = StoredTensor("F32", nan.shape, nan.tobytes())
    path = write_adapter(tmp_path / "adapter", tensors)
    limits = {"lora_modules": lora_modules, "max_lora_rank": 8}
    assert findings_of(read_adapter, path, **limits) != []
    assert findings_of(check_adapter, path, **limits) == []


def test_without_a_model_the_config_alone_is_checked(tmp_path: Path, lora_modules: Shapes) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules), {"r": 8})
    check_adapter(path, lora_modules=None, max_lora_rank=8)
    path = write_adapter(tmp_path / "dora", lora_tensors(lora_modules), {"use_dora": True})
    with pytest.raises(AdapterFormatError, match="does not yet support DoRA"):
        check_adapter(path, lora_modules=None, max_lora_rank=8)


def findings_of(read: Callable[..., object], path: str, **limits: object) -> list[str]:
    try:
        read(path, **limits)
    except AdapterFormatError as error:
        return error.findings
    return []


# ── files that are not what they should be ──────────────────────────────────────────────────


def test_a_missing_directory_is_not_found(tmp_path: Path, lora_modules: Shapes) -> None:
    path = str(tmp_path / "nowhere")
    with pytest.raises(
        AdapterNotFoundError, match=f"^No adapter found for {path}: there is no such"
    ):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)


def test_a_directory_without_config_is_not_found(tmp_path: Path, lora_modules: Shapes) -> None:
    told = f"No adapter found for {tmp_path}: the directory has no adapter_config.json"
    with pytest.raises(AdapterNotFoundError, match=f"^{told}$"):
        read_adapter(str(tmp_path), lora_modules=lora_modules, max_lora_rank=8)


def test_a_path_that_no_file_can_have_is_not_found(lora_modules: Shapes) -> None:
    with pytest.raises(AdapterNotFoundError, match="No adapter found"):
        read_adapter("a\0b", lora_modules=lora_modules, max_lora_rank=8)


def test_missing_weights_are_named(tmp_path: Path, read: Read, lora_modules: Shapes) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    os.unlink(os.path.join(path, "adapter_model.safetensors"))
    with pytest.raises(AdapterFormatError, match=r"there is no adapter_model\.safetensors"):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, lora_modules: Shapes
) -> None:
    import torch

    path = write_adapter(tmp_path / "it's", lora_tensors(lora_modules))
    os.unlink(os.path.join(path, "adapter_model.safetensors"))
    shared = torch.ones(4, 16)
    pair = {f"{Q0}.lora_A.weight": shared, f"{Q0}.lora_B.weight": shared.t()}
    torch.save(pair, os.path.join(path, "adapter_model.bin"))
    with pytest.raises(AdapterFormatError, match="is a pickle, which can run code") as error:
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)

    command = error.value.findings[0].partition("convert it with: python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True)
    checkpoint = read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)
    assert checkpoint.modules[0].b.shape == (16, 4)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    tmp_path: Path, lora_modules: Shapes, name: str
) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    os.unlink(os.path.join(path, name))
    os.mkfifo(os.path.join(path, name))
    with pytest.raises(AdapterError, match="not a regular file"):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)


def test_what_the_system_refuses_is_an_adapter_error(tmp_path: Path, lora_modules: Shapes) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    config = os.path.join(path, "adapter_config.json")
    os.unlink(config)
    os.symlink(config, config)  # a loop: even root cannot open it
    with pytest.raises(AdapterError, match="cannot be read: Too many levels of symbolic links"):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 10_000, "not valid JSON"),
        (b'{"r": 4, "r": 8}', "a key stands there twice"),
        (b'{"rank_pattern": {"q": 4, "q": 8}}', "a key stands there twice"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{" + b" " * 2**22 + b"}", "longer than 4194304 bytes"),
    ],
)
def test_a_broken_config_is_refused(
    tmp_path: Path, lora_modules: Shapes, config: bytes, part: str
) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    Path(path, "adapter_config.json").write_bytes(config)
    with pytest.raises(AdapterFormatError) as error:
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)
    assert part in str(error.value)


def test_a_header_that_claims_terabytes_costs_nothing(tmp_path: Path, lora_modules: Shapes) -> None:
    path = write_adapter(tmp_path / "adapter", {})
    weights = Path(path, "adapter_model.safetensors")
    size = 2**42
    entry = {"dtype": "F32", "shape": [size // 64, 16], "data_offsets": [0, size]}
    weights.write_bytes(safetensors_bytes({}, {f"{Q0}.lora_A.weight": entry}))
    os.truncate(weights, weights.stat().st_size + size)  # a hole: the file does have them
    with pytest.raises(AdapterFormatError, match="shapes that do not fit"):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)


def test_thousands_of_findings_are_counted_and_the_first_ones_told(
    findings: Findings, lora_modules: Shapes
) -> None:
    unknown = {f"setting {number}": 1 for number in range(50_000)}
    assert len(findings(lora_tensors(lora_modules), unknown)) == 33
    broken = dict.fromkeys((f"tensor {number}" for number in range(50_000)), "no description")
    with pytest.raises(AdapterFormatError, match=r"; and 49968 more$"):
        raise AdapterFormatError("adapter", [f"{name}: {what}" for name, what in broken.items()])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_whose_bytes_are_yet_to_come_is_refused(
    tmp_path: Path, lora_modules: Shapes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    Path(path, name).unlink()
    os.mkfifo(Path(path, name))
    writer = os.open(Path(path, name), os.O_RDWR)
    # As /proc/kmsg, which the system calls a regular file.
    monkeypatch.setattr(directory, "stat", SimpleNamespace(S_ISREG=lambda mode: True))
    with pytest.raises(AdapterError, match="it is no file of a disk"):
        read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)
    os.close(writer)


def test_findings_carry_no_raw_text_of_the_file(findings: Findings) -> None:
    name = "\x1b[2J\n" + "x" * 100_000
    (finding,) = findings({name: random_tensor((4, 16), 7)})
    assert finding.isprintable()
    assert len(finding) < 600


def test_the_base_models_name_is_text_that_can_be_sent(
    tmp_path: Path, lora_modules: Shapes
) -> None:
    path = write_adapter(tmp_path / "adapter", lora_tensors(lora_modules))
    config = json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "\ud800x"})
    Path(path, "adapter_config.json").write_text(config)
    checkpoint = read_adapter(path, lora_modules=lora_modules, max_lora_rank=8)
    assert checkpoint.base_model == "?x"


def test_a_directory_that_holds_a_model_is_told_from_one_that_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_config\.json$"):
        read_adapter(str(tmp_path), lora_modules={}, max_lora_rank=64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AdapterNotFoundError, match="it holds a model, which is served as MODEL"):
        read_adapter(str(tmp_path), lora_modules={}, max_lora_rank=64)


def test_of_another_method_tensors_are_not_told(findings: Findings, lora_modules: Shapes) -> None:
    tensors = {"base_model.model.x.hada_w1_a": random_tensor((4, 4), 1)}
    (finding,) = findings(tensors, {"peft_type": "LOHA"})
    assert finding.startswith("peft_type is 'LOHA'")


# ── biases ──────────────────────────────────────────────────────────────────────────────────


def with_bias(
    lora_modules: Shapes, name: str, size: int = 16, seed: int = 1
) -> dict[str, StoredTensor]:
    tensors = lora_tensors(some(lora_modules, Q0))
    return tensors | {f"base_model.model.{name}": random_tensor((size,), seed)}


def test_biases_are_read_with_their_scales(read: Read, lora_modules: Shapes) -> None:
    with_bias_of_b = with_bias(lora_modules, f"{Q0}.lora_B.bias")
    of_b = read(with_bias_of_b, {"lora_alpha": 6, "lora_bias": True})
    assert [(b.name, b.scale, b.values.shape) for b in of_b.biases] == [(Q0, 1.5, (16,))]
    own = read(with_bias(lora_modules, f"{Q0}.base_layer.bias"), {"bias": "lora_only"})
    assert [(b.name, b.scale) for b in own.biases] == [(Q0, None)]
    other = read(with_bias(lora_modules, f"{DOWN1}.bias"), {"bias": "all"})
    assert [(b.name, b.scale) for b in other.biases] == [(DOWN1, None)]
    changed = read(with_bias(lora_modules, f"{DOWN1}.bias", seed=2), {"bias": "all"})
    none = read(lora_tensors(some(lora_modules, Q0)))
    assert len({each.digest for each in (of_b, own, other, changed, none)}) == 5


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        (f"{Q0}.lora_B.bias", 15, "has shape (15,), not (16,)"),
        (f"{DOWN1}.lora_B.bias", 16, f"biases of lora_B without its weight: '{DOWN1}'"),
        ("model.norm.bias", 16, "tensors that are no lora_A or lora_B"),
    ],
)
def test_biases_that_fit_nothing_are_refused(
    findings: Findings, lora_modules: Shapes, name: str, size: int, words: str
) -> None:
    settings = {"bias": "all", "lora_bias": True}
    assert words in "; ".join(findings(with_bias(lora_modules, name, size), settings))


def test_patterns_are_bounded_by_how_many_modules_they_are_matched_with(tmp_path: Path) -> None:
    """Else one request could keep a thread of the loader busy for hours."""
    shapes = {f"model.layers.{layer}.self_attn.q_proj": (1, 1) for layer in range(1600)}
    few = dict(list(shapes.items())[:3])
    settings = {"rank_pattern": {".*.*.*x": 3}}
    path = write_adapter(tmp_path / "few", lora_tensors(few), settings)
    assert len(read_adapter(path, lora_modules=shapes, max_lora_rank=8).modules) == 3
    path = write_adapter(tmp_path / "many", lora_tensors(shapes), settings)
    with pytest.raises(AdapterFormatError, match=r"rank_pattern: .* with 1600 modules"):
        read_adapter(path, lora_modules=shapes, max_lora_rank=8)
