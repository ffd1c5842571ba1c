"""Writes models and tokenizers as llama.cpp's converter would, with the package gguf."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}
# By the tensor's name in the file; vectors are always F32.
TypeOf = Callable[[str], GgmlType]


def all_f32(name: str) -> GgmlType:
    return GgmlType.F32


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    type_of: TypeOf = all_f32,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **metadata: int | str | bool,
) -> Path:
    """Write the model; metadata: further values, without the architecture's name."""
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_config(writer, config)
    for key, value in metadata.items():
        writer.add_key_value(f"{writer.arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    stored = model.state_dict()
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for name, tensor in stored.items():
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert named is not None, name
        values = converted(name, tensor.float(), config).numpy()
        kind = type_of(named) if values.ndim > 1 else GgmlType.F32
        writer.add_tensor(named, quantized(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(values: NDArray[np.float32], kind: GgmlType) -> NDArray[Any]:
    """The stored bytes; for types that the package cannot write, random blocks."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind)


def random_blocks(shape: tuple[int, ...], kind: GgmlType) -> NDArray[np.uint8]:
    """Blocks of random codes and scales, with floats in them that are neither huge nor NaN."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(shape) + shape[0])
    blocks = generator.integers(0, 256, (math.prod(shape) // num_values, num_bytes), np.uint8)
    halves = {GgmlType.Q6_K: (208,), GgmlType.Q8_0: (0,), GgmlType.Q4_0: (0,), GgmlType.Q5_0: (0,)}
    for begin in halves.get(kind, (0, 2)):
        scales = generator.uniform(1e-4, 1e-3, (len(blocks), 1)).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // num_values * num_bytes)


def converted(name: str, tensor: Tensor, config: Any) -> Tensor:
    """The tensor as converters store it: Llama's q and k reordered, Gemma's norms with 1 added."""
    model_type = config.model_type
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if model_type == "llama" and projection in heads:
        halves = tensor.reshape(heads[projection], 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
    return tensor.contiguous()


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    if config.model_type.startswith("gemma"):
        add_gemma(writer, config)
    else:
        add_rope(writer, config.rope_parameters, head_size)


def add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], head_size: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_size).numpy())


def llama3_factors(rope: dict[str, Any], head_size: int) -> Tensor:
    """What Llama 3's scaling divides each frequency by."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_size, 2).double() / head_size)
    context = rope["original_max_position_embeddings"]
    turns = context * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def add_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    ropes = config.rope_parameters
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_rope_freq_base(ropes["rope_theta"])
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        return
    full, windowed = ropes["full_attention"], ropes["sliding_attention"]
    add_rope(writer, full, config.head_dim)
    writer.add_rope_freq_base_swa(windowed["rope_theta"])
    writer.add_array(
        f"{writer.arch}.attention.sliding_window_pattern",
        [kind == "sliding_attention" for kind in config.layer_types],
    )


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, split: str = "gpt-2"
) -> None:
    """Byte-level merges, with the way to split that the file is to name."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    added = tokenizer.added_tokens_decoder
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([text for text, _ in vocabulary])
    kinds = gguf.TokenType
    writer.add_token_types(
        [
            (kinds.CONTROL if added[i].special else kinds.USER_DEFINED)
            if i in added
            else kinds.NORMAL
            for _, i in vocabulary
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
