"""Writes checkpoints of GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes, as each is defined.

Codes, scales and zeros are random; what they stand for is computed in float64, whose results here
are exact. Nothing of lora_serve is used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.fakes.gguf_files import saved_tensors

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word, lowest first
ONES = {4: 0x11111111, 8: 0x01010101}  # a 1 in each number of a word
Ints = NDArray[np.int64]
# The parts of a weight of this shape, and the weight.
MakeWeight = Callable[[int, int, np.random.Generator], tuple[dict[str, Tensor], Tensor]]


@dataclass(frozen=True)
class Written:
    """settings: the quantization_config."""

    settings: Mapping[str, Any]
    make: MakeWeight


def save_quantized(model: PreTrainedModel, directory: Path, how: Written) -> dict[str, Tensor]:
    """Write the model with its layers' matrices made anew, but gates; all floats that it has."""
    directory.mkdir()
    rng, stored, floats = np.random.default_rng(3), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in saved_tensors(model).items():
        if name.endswith("_proj.weight"):
            parts, floats[name] = how.make(*tensor.shape, rng)
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{part}": each.contiguous() for part, each in parts.items()}
        else:
            stored[name] = floats[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config["quantization_config"] = how.settings
    (directory / "config.json").write_text(json.dumps(config))
    return floats


def save_mxfp4(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Write a gpt-oss with experts made anew; all floats that it then has."""
    directory.mkdir()
    rng, stored, floats = np.random.default_rng(3), dict[str, Tensor](), dict[str, Tensor]()
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, tensor in saved_tensors(model).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = floats[name] = tensor
            continue
        experts, width, rows = tensor.shape
        q = rng.integers(0, 16, (experts, rows, width))
        scales = rng.integers(120, 125, (experts, rows, width // 32))
        signed = np.where(q < 8, 1.0, -1.0) * magnitudes[q % 8]
        weight = signed * 2.0 ** (np.repeat(scales, 32, axis=2) - 127.0)
        floats[name] = as_floats(weight).transpose(1, 2)
        pairs = (q[:, :, 0::2] | q[:, :, 1::2] << 4).astype(np.uint8)
        stored[f"{name}_blocks"] = torch.from_numpy(pairs.reshape(experts, rows, -1, 16))
        stored[f"{name}_scales"] = torch.from_numpy(scales.astype(np.uint8))
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return floats


def packed(numbers: Ints, bits: int) -> Tensor:
    """(R, N) -> (R, N * bits / 32), int32, the first number in the lowest bits."""
    words = numbers.reshape(len(numbers), -1, 32 // bits).astype(np.uint64)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    joined = (words << shifts).sum(axis=-1, dtype=np.uint64).astype(np.uint32)
    return torch.from_numpy(joined.view(np.int32).copy())


def random_scales(rng: np.random.Generator, *shape: int) -> tuple[Tensor, NDArray[np.float64]]:
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, shape)).half()
    return scales, scales.double().numpy()


def as_floats(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def gptq(
    bits: int,
    group: int,
    *,
    version: str = "gptq",
    act_order: bool = False,
    symmetric: bool = False,
) -> Written:
    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        groups = width // group
        q = rng.integers(0, 2**bits, (width, rows))
        zeros = rng.integers(0, 2**bits, (groups, rows))
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        g_idx = np.arange(width) // group
        if act_order:
            g_idx = rng.permutation(g_idx)
        scales, exact = random_scales(rng, groups, rows)
        parts = {
            "qweight": packed(q.T, bits).T,
            # The tools subtract from words, so that a zero of 0 borrows from its neighbour.
            "qzeros": packed(zeros, bits) - (version == "gptq") * ONES[bits],
            "scales": scales,
            "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        }
        return parts, as_floats((exact[g_idx] * (q - zeros[g_idx])).T)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return Written({**settings, "checkpoint_format": version}, make)


def awq(group: int) -> Written:
    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        groups = width // group
        q, zeros = rng.integers(0, 16, (width, rows)), rng.integers(0, 16, (groups, rows))
        scales, exact = random_scales(rng, groups, rows)

        def ordered(numbers: Ints) -> Tensor:
            eights = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_COLUMNS]
            return packed(eights.reshape(numbers.shape), 4)

        of_input = np.arange(width) // group
        parts = {"qweight": ordered(q), "qzeros": ordered(zeros), "scales": scales}
        return parts, as_floats((exact[of_input] * (q - zeros[of_input])).T)

    return Written({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, make)


def compressed(
    form: str,
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    block: tuple[int, int] | None = None,
) -> Written:
    """group: None for a scale of each row. block: of scales, instead."""

    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        groups, half = (1 if group is None else width // group), 2 ** (bits - 1)
        if form == "float-quantized":
            tall, wide = block or (1, group or width)
            scales, exact = random_scales(rng, -(-rows // tall), -(-width // wide))
            values = torch.from_numpy(rng.normal(0, 20, (rows, width))).to(torch.float8_e4m3fn)
            spread = exact[np.arange(rows) // tall][:, np.arange(width) // wide]
            weight = spread * values.double().numpy()
            return {"weight": values, "weight_scale": scales}, as_floats(weight)
        scales, exact = random_scales(rng, rows, groups)
        of_input = np.arange(width) // (group or width)
        q = rng.integers(-half, half, (rows, width))
        zeros = np.zeros((rows, groups), np.int64)
        parts = {"weight_scale": scales}
        if form == "int-quantized":
            parts["weight"] = torch.from_numpy(q.astype(np.int8))
        else:
            parts["weight_packed"] = packed(q + half, bits)
            parts["weight_shape"] = torch.tensor([rows, width])
        if not symmetric:
            zeros = rng.integers(-half, half, (rows, groups))
            as_bytes = torch.from_numpy(zeros.astype(np.int8))
            is_packed = form == "pack-quantized"
            parts["weight_zero_point"] = packed((zeros + half).T, bits).T if is_packed else as_bytes
        return parts, as_floats(exact[:, of_input] * (q - zeros[:, of_input]))

    strategy = "block" if block else "channel" if group is None else "group"
    structure = list(block) if block else None
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "group_size": group}
    weights |= {"strategy": strategy, "block_structure": structure, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return Written(settings, make)


def mixed(first: Written, second: Written) -> Written:
    """Every other layer as one of two kinds of compressed-tensors."""
    turns = itertools.cycle((first, second))

    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return next(turns).make(rows, width, rng)

    both = (first.settings, second.settings)
    groups = {f"group_{i}": each["config_groups"]["group_0"] for i, each in enumerate(both)}
    return Written({**first.settings, "format": "mixed-precision", "config_groups": groups}, make)


def fp8(block: tuple[int, int] | None, scale_shape: tuple[int, ...] = ()) -> Written:
    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        values = torch.from_numpy(rng.normal(0, 20, (rows, width))).to(torch.float8_e4m3fn)
        tall, wide = block or (rows, width)
        shape = (-(-rows // tall), -(-width // wide)) if block else scale_shape
        # Few bits, so that each product is exact.
        scales = torch.from_numpy(np.asarray(rng.integers(1, 99, shape) / 1024)).float()
        at = scales.double().numpy().reshape(-(-rows // tall), -(-width // wide))
        weight = values.double().numpy() * at[np.arange(rows) // tall][:, np.arange(width) // wide]
        part = "weight_scale_inv" if block else "weight_scale"
        return {"weight": values, part: scales}, as_floats(weight)

    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Written(settings | ({"weight_block_size": list(block)} if block else {}), make)


# Dettmers et al. 2023, arxiv.org/abs/2305.14314, appendix E, here in the package's order.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(block: int = 64, *, nested_block: int | None = None) -> Written:
    """nested_block: of double quantisation."""

    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size = rows * width
        num_blocks = -(-size // block)
        code = np.array(NF4, np.float32)
        q = rng.integers(0, 16, size + size % 2)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = [rows, width]
        if nested_block is None:
            absmax = rng.uniform(0.01, 0.3, num_blocks).astype(np.float32)
            parts = {"weight.absmax": torch.from_numpy(absmax)}
        else:
            p = rng.integers(0, 256, num_blocks)
            nested_code = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            nested = rng.uniform(0.01, 0.1, -(-num_blocks // nested_block)).astype(np.float32)
            state |= {"nested_blocksize": nested_block, "nested_dtype": "float32"}
            state["nested_offset"] = offset = float(np.float32(0.123))
            absmax = nested_code[p] * nested[np.arange(num_blocks) // nested_block]
            absmax += np.float32(offset)
            parts = {
                "weight.absmax": torch.from_numpy(p.astype(np.uint8)),
                "weight.nested_absmax": torch.from_numpy(nested),
                "weight.nested_quant_map": torch.from_numpy(nested_code),
            }
        said = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        parts |= {
            "weight": torch.from_numpy((q[0::2] << 4 | q[1::2]).astype(np.uint8))[:, None],
            "weight.quant_map": torch.from_numpy(code),
            "weight.quant_state.bitsandbytes__nf4": torch.from_numpy(said),
        }
        values = code[q[:size]] * absmax[np.arange(size) // block]
        return parts, torch.from_numpy(values.reshape(rows, width))

    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested_block is not None}
    return Written({"quant_method": "bitsandbytes", "load_in_4bit": True, **settings}, make)


def llm_int8() -> Written:
    def make(rows: int, width: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
        q = rng.integers(-127, 128, (rows, width))
        scales = torch.from_numpy(rng.uniform(0.1, 0.5, rows)).float()
        parts = {
            "weight": torch.from_numpy(q.astype(np.int8)),
            "SCB": scales,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return parts, (scales / 127)[:, None] * torch.from_numpy(q).float()

    return Written({"quant_method": "bitsandbytes", "load_in_8bit": True}, make)
