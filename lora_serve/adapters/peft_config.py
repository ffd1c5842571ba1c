"""Reads PEFT's adapter_config.json: the settings of the delta, and those we cannot serve.

Every setting is honoured, known to be harmless, or refused. An unknown setting is refused when it
is set, because it may change the answers. Knows nothing of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeGuard, TypeVar, cast

from lora_serve.adapters.findings import listed, shown
from lora_serve.adapters.patterns import ModulePatterns, compile_patterns
from lora_serve.adapters.target_modules import TargetModules, parse_targets
from lora_serve.errors import AdapterFormatError

T = TypeVar("T")

HONOURED = frozenset(
    {
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "lora_bias",
        "init_lora_weights",
        "alora_invocation_tokens",
        "modules_to_save",
        "trainable_token_indices",
        "target_parameters",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
        "peft_version",
    }
)

HARMLESS = frozenset(
    {
        # where it comes from
        *("task_type", "auto_mapping", "revision"),
        # how it was trained, or how PEFT itself would run it
        *("inference_mode", "lora_dropout", "runtime_config", "merge_weights", "megatron_core"),
        # the base model's layout, which changes how PEFT merges, not what A and B are
        "fan_in_fan_out",
        # details of what another setting switches on
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    }
)

_CONVERT = "`lora-serve convert` writes it as plain LoRA"

REFUSED = {
    "use_dora": f"this server does not yet support DoRA; {_CONVERT}, or retrain without",
    "layer_replication": "it builds another base model; merge it and serve the result",
    "use_qalora": "QALoRA pools the input; retrain as plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not served; retrain as plain LoRA",
    "arrow_config": "routing between adapters is not served; load the adapters one by one",
    "kasa_config": f"KaSA changes the base weights; {_CONVERT}",
    "monteclora_config": "MonteCLoRA samples its weights; retrain as plain LoRA",
    "velora_config": "VeLoRA is not served; retrain as plain LoRA",
    "megatron_config": "Megatron's parallel layers are not served; convert to transformers",
}

# PEFT's methods that change no weights, which `lora-serve convert` refuses, too.
_OF_PROMPTS = frozenset(
    {
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT"),
        *("ADAPTION_PROMPT", "CARTRIDGE"),
    }
)
_OF_PROMPTS_ADVICE = (
    "it puts trained rows before the prompt or between layers, which no LoRA can express; retrain "
    "as LoRA"
)

# PEFT's other ways to begin take something out of the base weights that the adapter then needs.
SERVED_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_INIT_ADVICE = f"it changes the base weights; {_CONVERT}, or retrain"

_BIASES = ("none", "all", "lora_only")  # the tensors say whose they are
_LARGEST_FLOAT32 = 3.4e38
_MAX_RANK = 2**31 - 1
_MAX_INVOCATION_TOKENS = 128
_MAX_NAME_CHARACTERS = 500
_EXPERT_PARAMETER = re.compile(r"(.*\.)?(gate_up_proj|down_proj)", re.DOTALL)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?!\d).*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """What a setting may be, and what PEFT takes when the config leaves it out."""

    default: T
    must_be: str
    is_valid: Callable[[object], TypeGuard[T]]


def _is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _MAX_RANK


def _is_alpha(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(cast(float, value)) <= _LARGEST_FLOAT32


def _is_bool(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def _are_invocation_tokens(value: object) -> TypeGuard[tuple[int, ...]]:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MAX_INVOCATION_TOKENS
        and all(type(token) is int and 0 <= token < 2**31 for token in value)
    )


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token < 2**31 for token in value
    )


_INVOCATION: _Kind[tuple[int, ...]] = _Kind(
    (), f"a list of 1 to {_MAX_INVOCATION_TOKENS} ids of tokens, or null", _are_invocation_tokens
)
_RANK = _Kind(8, f"a whole number from 1 to {_MAX_RANK:,}", _is_rank)
_ALPHA = _Kind(8.0, "a finite number", _is_alpha)
_SWITCH = _Kind(False, "true or false", _is_bool)


@dataclass(frozen=True, slots=True)
class LoRASettings:
    """Rank and scale of every module. base_model: "" if the config names none.

    is_lora: or it is another of PEFT's methods, of which only what all have in common is right.
    invocation_tokens: as of `AdapterCheckpoint`.
    modules_to_save: names, or ends of names, of modules that were copied and trained.
    trainable_tokens: the same of matrices of which some rows were, and which; "": the embeddings.
    target_parameters: the same of parameters of experts. targets: the modules that have LoRA.
    lora_bias: whether lora_B has biases. peft_version: None if it is not told.
    """

    is_lora: bool = True
    rank: int = _RANK.default
    alpha: float = _ALPHA.default
    use_rslora: bool = False
    rank_pattern: ModulePatterns[int] = field(default_factory=ModulePatterns)
    alpha_pattern: ModulePatterns[float] = field(default_factory=ModulePatterns)
    base_model: str = ""
    invocation_tokens: tuple[int, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    target_parameters: tuple[str, ...] = ()
    targets: TargetModules = field(default_factory=TargetModules)
    lora_bias: bool = False
    peft_version: tuple[int, int, int] | None = None

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(module, self.rank)

    def unmatchable(self, num_modules: int) -> list[str]:
        """The settings whose patterns cannot be matched with so many names."""
        can_match = {
            "rank_pattern": self.rank_pattern.can_match(num_modules),
            "alpha_pattern": self.alpha_pattern.can_match(num_modules),
        }
        return [name for name, can in can_match.items() if not can]

    def scale_of(self, module: str, rank: int) -> float:
        """rank: of this module."""
        alpha = self.alpha_pattern.get(module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets_parameter(self, name: str) -> bool:
        """Whether PEFT put LoRA on the parameter of this whole name."""
        return any(
            name == target or name.endswith(f".{target}") for target in self.target_parameters
        )


def parse_settings(config: Mapping[str, object], findings: list[str]) -> LoRASettings:
    """The settings that shape the delta; whatever cannot be served is appended to `findings`.

    Of another method than LoRA that is its name alone: its settings mean other things.
    """
    is_lora = config.get("peft_type") == "LORA"
    if not is_lora:
        findings.append(_other_method(config.get("peft_type")))
        findings = []
    _check_choices(config, findings)
    _check_refused(config, findings)
    saved = _modules_to_save(config, findings)
    return LoRASettings(
        is_lora=is_lora,
        rank=_value(config, "r", _RANK, findings),
        alpha=_value(config, "lora_alpha", _ALPHA, findings),
        use_rslora=_value(config, "use_rslora", _SWITCH, findings),
        rank_pattern=_patterns(config, "rank_pattern", _RANK, findings),
        alpha_pattern=_patterns(config, "alpha_pattern", _ALPHA, findings),
        base_model=_text(config.get("base_model_name_or_path")),
        invocation_tokens=_invocation_tokens(config, findings),
        modules_to_save=saved,
        trainable_tokens=_trainable_tokens(config, findings),
        target_parameters=_target_parameters(config, findings),
        targets=parse_targets(config, saved, findings),
        lora_bias=_value(config, "lora_bias", _SWITCH, findings),
        peft_version=_version(config.get("peft_version")),
    )


def _other_method(peft_type: object) -> str:
    if isinstance(peft_type, str) and peft_type in _OF_PROMPTS:
        return f"peft_type is {shown(peft_type)}: {_OF_PROMPTS_ADVICE}"
    return f"peft_type is {shown(peft_type)}; only 'LORA' is served; {_CONVERT}"


def _invocation_tokens(config: Mapping[str, object], findings: list[str]) -> tuple[int, ...]:
    """The tokens of an activated LoRA; none of any other, for which PEFT writes null."""
    name = "alora_invocation_tokens"
    if config.get(name) is None:
        return ()
    token_ids = _value(config, name, _INVOCATION, findings)
    return tuple(token_ids)


def _modules_to_save(config: Mapping[str, object], findings: list[str]) -> tuple[str, ...]:
    names = config.get("modules_to_save") or []
    if not _are_names(names):
        findings.append(f"modules_to_save is {shown(names)}; it must be a list of names, or null")
        return ()
    return tuple(names)


def _target_parameters(config: Mapping[str, object], findings: list[str]) -> tuple[str, ...]:
    """The parameters of experts.

    LoRA on any other is scaled by patterns that name it, not its module.
    """
    names = config.get("target_parameters") or []
    if not _are_names(names):
        findings.append(f"target_parameters is {shown(names)}; it must be a list of names, or null")
        return ()
    others = [name for name in names if not _EXPERT_PARAMETER.fullmatch(name)]
    if others:
        findings.append(
            f"target_parameters has {listed(others)}: only experts' gate_up_proj and down_proj are "
            "served; retrain with target_modules"
        )
    return tuple(names)


def _version(value: object) -> tuple[int, int, int] | None:
    match = _VERSION.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def _trainable_tokens(
    config: Mapping[str, object], findings: list[str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tokens of each matrix. PEFT takes a list for the embeddings'."""
    value = config.get("trainable_token_indices") or {}
    by_matrix: dict[str, object] = value if isinstance(value, dict) else {"": value}
    found = []
    for name, token_ids in by_matrix.items():
        if not _are_token_ids(token_ids):
            findings.append(
                f"trainable_token_indices is {shown(value)}; it must be a list of ids of tokens, "
                "or have one for each module"
            )
            return ()
        found.append((name, tuple(token_ids)))
    return tuple(found)


def _check_choices(config: Mapping[str, object], findings: list[str]) -> None:
    bias = config.get("bias", "none")
    if bias not in _BIASES:
        findings.append(f"bias is {shown(bias)}; it must be one of {', '.join(_BIASES)}")
    init = config.get("init_lora_weights", True)
    is_plain = init is None or isinstance(init, bool)
    if not is_plain and not (isinstance(init, str) and init.lower() in SERVED_INITS):
        findings.append(f"init_lora_weights is {shown(init)}: {_INIT_ADVICE}")


def _check_refused(config: Mapping[str, object], findings: list[str]) -> None:
    for name, value in config.items():
        if not value or name in HONOURED or name in HARMLESS:
            continue
        if len(findings) > AdapterFormatError.MAX_FINDINGS:
            return
        advice = REFUSED.get(name, "this setting is unknown here; update lora-serve or retrain")
        findings.append(f"{shown(name)} is set to {shown(value)}: {advice}")


def _value(config: Mapping[str, object], name: str, kind: _Kind[T], findings: list[str]) -> T:
    value = config.get(name, kind.default)
    if kind.is_valid(value):
        return value
    findings.append(f"{name} is {shown(value)}; it must be {kind.must_be}")
    return kind.default


def _patterns(
    config: Mapping[str, object], name: str, kind: _Kind[T], findings: list[str]
) -> ModulePatterns[T]:
    values = config.get(name)
    if values is None:
        return ModulePatterns()
    if not isinstance(values, dict):
        findings.append(f"{name} is {shown(values)}; it must be an object")
        return ModulePatterns()
    bad = [key for key, value in values.items() if not kind.is_valid(value)]
    if bad:
        findings.append(f"{name}: {listed(bad)} must each be {kind.must_be}")
        return ModulePatterns()
    return compile_patterns(name, values, findings)


def _text(value: object) -> str:
    """A name for people to read, whatever a file holds in its place."""
    text = value if isinstance(value, str) else ""
    return text[:_MAX_NAME_CHARACTERS].encode(errors="replace").decode()
