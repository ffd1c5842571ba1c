"""What a GGUF file's metadata says of its model, in the words of a config.json.

The families' readers take it from there. What would be computed wrongly, and no config.json could
say, is refused here, all of it at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from lora_serve.errors import ConfigError
from lora_serve.gguf.header import GgufHeader, Value
from lora_serve.models.checkpoints.gguf_families import (
    FAMILIES,
    WINDOWED_BASE,
    GgufFamily,
    family_of,
)
from lora_serve.models.common_config import FULL, SLIDING

ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

# Behind the architecture's name; those without a value are required.
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
    }
)
_OPTIONAL_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rope_theta": "rope.freq_base",
    }
)
# Of a scaling of these kinds.
_LONGROPE, _YARN, _LINEAR, _NONE = "longrope", "yarn", "linear", "none"
_ORIGINAL = "original_max_position_embeddings"
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
_SCALING_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        _LONGROPE: {
            _ORIGINAL: _ORIGINAL_CONTEXT,
            "attention_factor": "rope.scaling.attn_factor",
        },
        _YARN: {
            _ORIGINAL: _ORIGINAL_CONTEXT,
            "attention_factor": "rope.scaling.yarn_attn_factor",
            "beta_fast": "rope.scaling.yarn_beta_fast",
            "beta_slow": "rope.scaling.yarn_beta_slow",
        },
        _LINEAR: {},
        _NONE: {},
    }
)
# What changes a model's arithmetic, with the values that do not.
_OTHER_ARITHMETIC: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "expert_gating_func": (1,),
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "interleave_moe_layer_step": (0, 1),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.sliding_window": (0,),
        "embedding_scale": (1,),
        "logit_scale": (1,),
        "residual_scale": (1,),
        "use_parallel_residual": (False,),
        "rope.scaling.attn_factor": (1,),
        "rope.scaling.yarn_attn_factor": (1,),
        "rope.scaling.yarn_ext_factor": (1,),
    }
)
# All of its names may change the arithmetic; those that are read nowhere are refused.
_ARITHMETIC = re.compile(r"attention\..*|rope\..*|expert_.*|.*_scale|.*_softcapping")
# What is read elsewhere than by the tables above, says what tensors do, or changes nothing.
_HARMLESS = frozenset(
    {
        *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        *("attention.sliding_window_pattern", "attention.value_length"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
        *("expert_group_used_count", "expert_used_count", "expert_weights_norm"),
        *("rope.dimension_count", "rope.scale_linear"),
        *("rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.type", _ORIGINAL_CONTEXT),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
# llama.cpp knows by the number of layers which Gemmas take the scale of attention from the hidden
# size; a file does not say.
_GEMMA_27B_LAYERS: Mapping[str, int] = MappingProxyType({"gemma2": 46, "gemma3": 62})


def config_of(header: GgufHeader, readable_types: tuple[str, ...]) -> dict[str, object]:
    """The config.json that the model would have.

    readable_types: what tensors may be of.

    Raises:
        ConfigError: listing everything that is not supported.
    """
    findings = [*_file_findings(header), *_type_findings(header, readable_types)]
    architecture, family = header.metadata.get("general.architecture"), family_of(header.metadata)
    if family is None:
        findings.append(
            f"the architecture {str(architecture)[:80]!r} is not supported in GGUF files; "
            f"supported are {', '.join(FAMILIES)}"
        )
    else:
        findings += _metadata_findings(header, str(architecture), family)
    if findings or family is None:
        raise ConfigError(f"{header.path}: " + "; ".join(findings))
    return _config(header, str(architecture), family)


def _file_findings(header: GgufHeader) -> list[str]:
    findings = []
    kind, parts = header.metadata.get("general.type", "model"), header.metadata.get("split.count")
    if kind != "model":
        findings.append(f"the file holds no model but a {str(kind)[:80]!r}")
    if isinstance(parts, int) and parts > 1:
        findings.append(
            f"the model is split into {parts} files; join them with llama-gguf-split --merge"
        )
    return findings


def _type_findings(header: GgufHeader, readable_types: tuple[str, ...]) -> list[str]:
    counts = Counter(entry.type_name for entry in header.tensors.values())
    return [
        f"{count} tensors are of the type {name}, which is not supported; supported are "
        f"{', '.join(readable_types)}: take the file of another quantisation"
        for name, count in sorted(counts.items())
        if name not in readable_types
    ]


def _metadata_findings(header: GgufHeader, architecture: str, family: GgufFamily) -> list[str]:
    metadata, tensors = header.metadata, header.tensors
    keys = [f"{architecture}.{key}" for key in (*_KEYS.values(), family.eps[1])]
    findings = [f"{key} is missing from the metadata" for key in keys if key not in metadata]
    findings += [
        f"{key} of {metadata[key]!r:.80} is not supported"
        for key in _other_arithmetic(header, architecture, family)
    ]
    findings += [
        f"{key} must be one whole number, is {value!r:.80}"
        for key, least in (
            (f"{architecture}.attention.head_count", 1),
            (f"{architecture}.attention.head_count_kv", 1),
            (f"{architecture}.expert_count", 0),
        )
        if not isinstance(value := metadata.get(key, 1), int) or value < least
    ]
    if _EMBEDDING not in tensors or len(tensors[_EMBEDDING].shape) != 2:
        findings.append(f"{_EMBEDDING}, a matrix, is missing")
    key_size, value_size = (
        metadata.get(f"{architecture}.attention.{kind}_length") for kind in ("key", "value")
    )
    if key_size != value_size:
        findings.append(f"keys of size {key_size} and values of size {value_size} are not equal")
    return findings


def _other_arithmetic(header: GgufHeader, architecture: str, family: GgufFamily) -> list[str]:
    """The keys that would change the model's arithmetic, and are not heeded."""
    kind = _scaling_kind(header, architecture)
    read = {
        *(*_KEYS.values(), *_OPTIONAL_KEYS.values(), *family.keys.values()),
        *_SCALING_KEYS.get(kind, {}).values(),
    }
    # llama.cpp has this key say of Granite alone whether it rotates.
    rotates = () if architecture.startswith("granite") else (False,)
    plain = {**_OTHER_ARITHMETIC, "rope.scaling.finetuned": (True, *rotates)}
    found = []
    for name, value in header.metadata.items():
        prefix, _, key = name.partition(".")
        if prefix != architecture or key in read:
            continue
        is_other = _ARITHMETIC.fullmatch(key) is not None and key not in _HARMLESS
        if value not in plain[key] if key in plain else is_other:
            found.append(name)
    if kind in (_LINEAR, _YARN) and ROPE_FREQS in header.tensors:
        found.append(f"{architecture}.rope.scaling.factor")  # beside the factors of a tensor
    return found


def _config(header: GgufHeader, architecture: str, family: GgufFamily) -> dict[str, object]:
    """What metadata that has been checked says."""

    def stated(keys: Mapping[str, str]) -> dict[str, object]:
        return {
            name: _plain(header.metadata[f"{architecture}.{key}"])
            for name, key in keys.items()
            if f"{architecture}.{key}" in header.metadata
        }

    config: dict[str, object] = {
        "architectures": [family.architecture],
        "vocab_size": header.tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": _HEAD not in header.tensors,
        "torch_dtype": _dtype(header, family),
        family.bias_key: "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,  # heeded for Command R alone
        **family.stated,
        **stated(_KEYS),
        **stated(_OPTIONAL_KEYS),
        **stated({family.eps[0]: family.eps[1]}),
        **stated(family.keys),
    }
    if not config.get("sliding_window", 1):  # as Phi 4 has it
        config["sliding_window"] = None
    head_size = config.setdefault("head_dim", _head_size(config))
    rotated = header.metadata.get(f"{architecture}.rope.dimension_count", head_size)
    config["partial_rotary_factor"] = _ratio(rotated, head_size)
    kind = _scaling_kind(header, architecture)
    scaled = stated(_SCALING_KEYS.get(kind, {}))
    config |= _rope(config, family, _rope_scaling(header, architecture, rotated, scaled))
    if family.has_experts:
        config["mlp_only_layers"] = _layers_without_experts(header, config)
    pattern = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = [SLIDING if is_windowed else FULL for is_windowed in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    if family.is_gemma:
        config |= _gemma(header, architecture, config)
    return config


def _layers_without_experts(header: GgufHeader, config: Mapping[str, object]) -> list[object]:
    """Such layers among the first, as many as there are tensors: a file may lie of its layers."""
    layers = config["num_hidden_layers"]
    count = min(layers, len(header.tensors)) if isinstance(layers, int) else 0
    return [i for i in range(count) if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors]


def _plain(value: Value) -> Value:
    """A float32 as its shortest decimal: 9.99999974e-06 is 1e-05, as the model's authors wrote."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_size(config: Mapping[str, object]) -> object:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return hidden // heads
    return None  # its reader refuses the two


def _ratio(part: object, whole: object) -> object:
    if isinstance(part, int) and isinstance(whole, int) and whole > 0:
        return part / whole
    return part


def _dtype(header: GgufHeader, family: GgufFamily) -> str:
    """What to compute in: the matrices' own type, else bfloat16, which quantised ones fit into."""
    types = {entry.type_name for entry in header.tensors.values() if len(entry.shape) > 1}
    if types == {"F32"}:
        return "float32"
    # Gemma's activations go beyond what float16 can hold.
    return "float16" if types == {"F16"} and not family.is_gemma else "bfloat16"


def _rope(
    config: dict[str, object], family: GgufFamily, scaling: Mapping[str, object]
) -> dict[str, object]:
    """What is said of rotary positions; what it replaces is taken out of the config."""
    original = scaling.get(_ORIGINAL, config["max_position_embeddings"])
    found = {_ORIGINAL: original} if scaling else {}  # beside it, where Phi-3 has it
    base = config.pop(WINDOWED_BASE, None)
    if base is None and WINDOWED_BASE in family.keys and not family.is_gemma:
        base = config.get("rope_theta")
    if base is not None:
        full = {"rope_theta": config.pop("rope_theta", None), **scaling}
        return found | {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": base}}}
    return found | ({"rope_scaling": scaling} if scaling else {})


def _scaling_factor(header: GgufHeader, architecture: str) -> Value | None:
    metadata, rope = header.metadata, f"{architecture}.rope"
    return metadata.get(f"{rope}.scaling.factor", metadata.get(f"{rope}.scale_linear"))


def _scaling_kind(header: GgufHeader, architecture: str) -> str:
    """How positions are scaled: as the file says it, or, where it does not, as llama.cpp does."""
    if _LONG_FACTORS in header.tensors:
        return _LONGROPE
    silent = _NONE if _scaling_factor(header, architecture) in (None, 0, 1) else _LINEAR
    return str(header.metadata.get(f"{architecture}.rope.scaling.type", silent))


def _rope_scaling(
    header: GgufHeader, architecture: str, rotated: object, scaled: Mapping[str, object]
) -> dict[str, object]:
    """A config's rope_scaling. rotated: channels of a head that turn. scaled: of _SCALING_KEYS."""
    kind, factor = (each(header, architecture) for each in (_scaling_kind, _scaling_factor))
    if ROPE_FREQS in header.tensors and isinstance(rotated, int):
        factors = _factors(header, ROPE_FREQS, rotated // 2)
        equal = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": _LONGROPE, **equal}
    if _LONG_FACTORS in header.tensors and isinstance(rotated, int):
        long = _factors(header, _LONG_FACTORS, rotated // 2)
        short = _factors(header, _SHORT_FACTORS, rotated // 2)
        return {"rope_type": _LONGROPE, "short_factor": short, "long_factor": long, **scaled}
    if kind == _NONE:
        return {}
    scaling: dict[str, object] = {"rope_type": kind, **scaled}
    if factor is not None:
        scaling["factor"] = _plain(factor)
    return scaling


def _factors(header: GgufHeader, name: str, num_frequencies: int) -> list[float]:
    """The numbers by which rotary frequencies are divided."""
    entry = header.tensors.get(name)
    if entry is None or entry.type_name != "F32" or entry.shape != (num_frequencies,):
        found = "missing" if entry is None else f"{entry.type_name} of shape {entry.shape}"
        raise ConfigError(
            f"{header.path}: {name} must be {num_frequencies} numbers of F32, is {found}"
        )
    with header.path.open("rb") as file:
        file.seek(entry.begin)
        values: list[float] = np.frombuffer(file.read(4 * num_frequencies), "<f4").tolist()
    return values


def _gemma(
    header: GgufHeader, architecture: str, config: Mapping[str, object]
) -> dict[str, object]:
    """Which layers have the window, if none has, and what attention's scale is made of."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    is_27b = layers == _GEMMA_27B_LAYERS[architecture]
    size = _ratio(config["hidden_size"], heads) if is_27b else config["head_dim"]
    found: dict[str, object] = {"query_pre_attn_scalar": size}
    has_windows = "layer_types" in config or config.get("sliding_window")
    if architecture == "gemma3" and not has_windows and isinstance(layers, int):
        found |= {"layer_types": [FULL] * min(layers, len(header.tensors)), "sliding_window": 1}
    return found
