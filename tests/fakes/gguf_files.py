"""Writes models and tokenizers as llama.cpp's converter would, with the package gguf."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.fakes.tokenizer_files import CHAT_TEMPLATE, byte_level_tokenizer

ARCHITECTURES = {
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
}
LLAMAS = ("llama", "granite", "granitemoe", "mixtral", "smollm3")  # whose q and k are reordered
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
# By the tensor's name in the file; vectors are always F32.
TypeOf = Callable[[str], GgmlType]


def all_f32(name: str) -> GgmlType:
    return GgmlType.F32


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    type_of: TypeOf = all_f32,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **metadata: int | float | str | bool,
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
    # The map of Llama's has the MLPs of layers without experts, too.
    maps = [
        gguf.get_tensor_name_map(each, config.num_hidden_layers)
        for each in (architecture, gguf.MODEL_ARCH.LLAMA)
    ]
    for name, tensor in with_experts_together(saved_tensors(model)).items():
        found = (names.get_name(name, try_suffixes=(".weight", ".bias")) for names in maps)
        named = next(filter(None, found))
        values = converted(name, tensor.float(), config).numpy()
        kind = type_of(named) if values.ndim > 1 else GgmlType.F32
        writer.add_tensor(named, quantized(values, kind), raw_dtype=kind)
    finish(writer)
    return path


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a checkpoint of the model."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory, "model.safetensors"))


def with_experts_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, one for each projection of all experts."""
    together, experts = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in tensors.items():
        if expert := EXPERT.fullmatch(name):
            experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            for half, part in zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True):
                together[name.replace("input_linear", f"experts.{half}")] = part
        else:
            together[name] = tensor
    return together | {name: torch.stack([e[i] for i in sorted(e)]) for name, e in experts.items()}


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
    """The tensor as converters store it: Llamas' q and k reordered, Gemma's norms with 1 added."""
    model_type = config.model_type
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if model_type in LLAMAS and projection in heads:
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
    add_eps(writer, config)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    match config.model_type:
        case "gemma2" | "gemma3_text":
            add_gemma(writer, config)
            return
        case "granite" | "granitemoe":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "cohere" | "cohere2":
            writer.add_logit_scale(config.logit_scale)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.model_type in ("cohere2", "olmo3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    rope = config.rope_parameters
    if config.model_type == "olmo3":
        add_pattern(writer, config)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if getattr(config, "num_experts_per_tok", None):
        add_experts(writer, config)
    rotated = int(head_size * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotated)
    add_rope(writer, rope, rotated, config.max_position_embeddings)


def add_eps(writer: gguf.GGUFWriter, config: Any) -> None:
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif hasattr(config, "norm_epsilon"):
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(
        config.num_local_experts if config.model_type == "mixtral" else config.num_experts
    )
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type.startswith("qwen"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_pattern(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_array(
        f"{writer.arch}.attention.sliding_window_pattern",
        [kind == "sliding_attention" for kind in config.layer_types],
    )


def add_rope(
    writer: gguf.GGUFWriter, rope: dict[str, Any], head_size: int, max_positions: int
) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    match rope["rope_type"]:
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for key, add in (
                ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
                ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
            ):
                if rope.get(key) is not None:
                    add(rope[key])
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "longrope":
            original = rope["original_max_position_embeddings"]
            scale = max_positions / original
            amplitude = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(amplitude)
            for kind in ("long", "short"):
                factors = np.array(rope[f"{kind}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{kind}.weight", factors)
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
    add_rope(writer, full, config.head_dim, config.max_position_embeddings)
    writer.add_rope_freq_base_swa(windowed["rope_theta"])
    add_pattern(writer, config)


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


def write_filled(path: Path, fill: Any, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    finish(writer)
    return path


def write_byte_level(path: Path, split: str = "gpt-2", **options: Any) -> Path:
    """A file without tensors, with the tiny byte-level tokenizer and its chat template."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE

    def fill(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, tokenizer, split)
        for key, value in options.items():
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))

    return write_filled(path, fill)
