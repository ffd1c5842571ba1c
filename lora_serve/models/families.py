"""From a checkpoint's config.json to a DecoderSpec, for the families that share one decoder.

What we would compute wrongly is refused by name, all of it at once; keys that do not change the
forward pass are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.errors import ConfigError
from lora_serve.models.rope import read_rope
from lora_serve.models.settings import Settings
from lora_serve.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's code fixes, or assumes where its config is silent.

    qkv_bias: None where the config's attention_bias decides, for o as well.
    sliding_window: in tokens, where the config has no such key. windows_by_layer: whether a window
    takes use_sliding_window and applies from layer max_window_layers on.
    """

    qkv_bias: bool | None
    qk_norm: bool = False
    num_kv_heads: int | None = None
    head_size: int | None = None
    sliding_window: int | None = None
    windows_by_layer: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None),
    "MistralForCausalLM": Family(qkv_bias=False, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, num_kv_heads=32, sliding_window=4096, windows_by_layer=True
    ),
    "Qwen3ForCausalLM": Family(
        qkv_bias=None,
        qk_norm=True,
        num_kv_heads=32,
        head_size=128,
        sliding_window=4096,
        windows_by_layer=True,
    ),
}


def read_spec(config: Mapping[str, object], path: str) -> DecoderSpec:
    """The facts of the model whose config.json, found at `path`, holds `config`.

    Raises:
        ConfigError: listing everything that is missing, malformed or not supported.
    """
    architecture, family = _family(config, path)
    settings = Settings(config)
    _refuse_other_arithmetic(settings)
    spec = _read(settings, architecture, family)
    _check_heads(settings, spec)
    if settings.findings:
        raise ConfigError(f"{path}: " + "; ".join(settings.findings))
    return spec


def _family(config: Mapping[str, object], path: str) -> tuple[str, Family]:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ConfigError(
        f"{path}: architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _refuse_other_arithmetic(settings: Settings) -> None:
    for key in ("quantization_config", "compression_config"):
        if settings.get(key):
            settings.refuse(f"quantised checkpoints are not supported ({key} is set)")
    if settings.text("hidden_act", "silu") not in ("silu", "swish"):
        settings.refuse(f"hidden_act {settings.get('hidden_act')!r} is not supported; silu is")
    if settings.flag("mlp_bias", False):
        settings.refuse("mlp_bias is not supported")


def _read(settings: Settings, architecture: str, family: Family) -> DecoderSpec:
    num_layers = settings.integer("num_hidden_layers")
    num_heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    attention_bias = family.qkv_bias is None and settings.flag("attention_bias", False)
    rope, max_positions = read_rope(settings, settings.integer("max_position_embeddings"))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        head_size=settings.integer("head_dim", family.head_size or hidden_size // num_heads),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions,
        qkv_bias=bool(family.qkv_bias) or attention_bias,
        output_bias=attention_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(settings, family, num_layers),
        dtype=settings.text("dtype", "") or settings.text("torch_dtype", "") or None,
    )


def _sliding_window(settings: Settings, family: Family, num_layers: int) -> int | None:
    """The window of all layers, or None. A model that mixes windowed and full layers is refused."""
    if family.windows_by_layer and not settings.flag("use_sliding_window", False):
        return None
    if "sliding_window" in settings and settings.get("sliding_window") is None:
        return None
    if family.sliding_window is None:
        return None  # the family's code does not look at the key
    window = settings.integer("sliding_window", family.sliding_window)
    if not family.windows_by_layer:
        return window
    first = settings.integer("max_window_layers", 28, least=0)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    stated = settings.get("layer_types")
    kinds = set(map(str, stated if isinstance(stated, list) else default))
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        settings.refuse(f"layers of different attention ({', '.join(sorted(kinds))})")
    return window


def _check_heads(settings: Settings, spec: DecoderSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        settings.refuse(
            f"num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads "
            f"{spec.num_kv_heads}"
        )
    if spec.head_size % 2:
        settings.refuse(f"head_dim {spec.head_size} is odd; rotary positions need pairs")
