"""How tokens are drafted that steps then verify, as JSON in vLLM's form or as flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lora_serve.config.json_settings import read_json, take_in_json
from lora_serve.config.model import QUANTIZATIONS
from lora_serve.config.setting import require_choices, setting
from lora_serve.errors import ConfigError

DRAFT_MODEL = "draft_model"
LOOKED_UP = ("ngram", "suffix")  # methods that guess by text that was there before
METHODS = (*LOOKED_UP, DRAFT_MODEL)
_FLAG = "speculative-config"
_PREFIX = "speculative_"
_DRAFTERS_A_ROW = 2
# AMX multiplies 16 rows of bf16 in the time of one, and more in little more; rows of codes cost
# more. What is measured at the start says how many pay. Forced tokens save as much with few rows,
# and each number is recorded.
_ROWS_OF_GUESSES = 64
_ROWS_OF_FORCED_TOKENS = 16
TOKENS_TAKEN_IN = 256  # by a draft model in a step, at least
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, 256),
    "max_step_rows": (2, 1024),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
    "suffix_decoding_max_tree_depth": (1, 1024),
    "suffix_decoding_max_spec_factor": (0.1, 100),
    "suffix_decoding_max_cached_tokens": (0, 2**31),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted that steps then verify. Answers are the same, to the bit."""

    speculation: str | None = setting(
        "Whether tokens are drafted: auto drafts by suffixes unless --speculative-config names a "
        "method; off drafts nothing, even if it does, and not what a grammar forces either.",
        None,
        choices=("auto", "off"),
    )
    speculative_method: str | None = setting(
        "Draft how an answer may go on: by the request's own text (ngram), also by past answers of "
        "the same adapter version, cache salt and API key (suffix), or by a smaller model "
        "(draft_model). If left out, only the tokens that a grammar forces are drafted, unless a "
        "draft model is named.",
        None,
        choices=METHODS,
        flag=f"{_FLAG}.method",
    )
    speculative_num_speculative_tokens: int = setting(
        "Most tokens that are drafted for one request in one step.",
        16,
        flag=f"{_FLAG}.num-speculative-tokens",
    )
    speculative_max_step_rows: int | None = setting(
        "Most rows that a step with drafts samples from, of all requests together; 64 if left "
        "out, or 16 where only the tokens that a grammar forces are drafted.",
        None,
        flag=f"{_FLAG}.max-step-rows",
    )
    speculative_measure_row_costs: bool = setting(
        "Measure at start how much longer steps take with more rows, and draft only where that "
        "pays; without it, drafts fill all rows up to max-step-rows.",
        True,
        flag=f"{_FLAG}.measure-row-costs",
    )
    speculative_prompt_lookup_min: int | None = setting(
        "ngram: the fewest last tokens that must have stood before; 2, or prompt-lookup-max if "
        "that is less.",
        None,
        flag=f"{_FLAG}.prompt-lookup-min",
    )
    speculative_prompt_lookup_max: int | None = setting(
        "ngram: the most last tokens that are looked up; 5, or prompt-lookup-min if that is more.",
        None,
        flag=f"{_FLAG}.prompt-lookup-max",
    )
    speculative_suffix_decoding_max_tree_depth: int = setting(
        "suffix: a match of more tokens counts as one of so many.",
        24,
        flag=f"{_FLAG}.suffix-decoding-max-tree-depth",
    )
    speculative_suffix_decoding_max_spec_factor: float = setting(
        "suffix: how many tokens are drafted for each token that matches.",
        2.0,
        flag=f"{_FLAG}.suffix-decoding-max-spec-factor",
    )
    speculative_suffix_decoding_max_cached_tokens: int = setting(
        "suffix: how many tokens of past answers are kept, of all requests together; about 250 "
        "bytes each.",
        131_072,
        flag=f"{_FLAG}.suffix-decoding-max-cached-tokens",
    )
    speculative_model: str | None = setting(
        "draft_model: directory, hub id or GGUF file of the draft model, which has the vocabulary "
        "of the model that is served.",
        None,
        flag=f"{_FLAG}.model",
    )
    speculative_revision: str | None = setting(
        "draft_model: branch, tag or commit of a draft model of the hub.",
        None,
        flag=f"{_FLAG}.revision",
        metavar="REV",
    )
    speculative_quantization: str | None = setting(
        "draft_model: keep its linear layers in 8 or 4 bits, as --quantization does.",
        None,
        choices=QUANTIZATIONS,
        flag=f"{_FLAG}.quantization",
    )
    speculative_config: str | Mapping[str, object] | None = setting(
        "The settings above as JSON in vLLM's form, such as "
        '{"method": "suffix", "num_speculative_tokens": 16}.',
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            _refuse_other_methods(self.speculative_config)
        take_in_json(self, "speculative_config", _PREFIX)
        require_choices(self)
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, _PREFIX + name)
            if value is not None and not low <= value <= high:
                flag = f"--{_FLAG}.{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {value} must be from {low} to {high}")
        low, high = self.ngram_sizes
        if high < low:
            raise ConfigError(
                f"--{_FLAG}: prompt_lookup_max {high} must be at least prompt_lookup_min {low}"
            )
        self._check_draft_model()
        given = self._given("speculative_max_step_rows")  # which holds for forced tokens, too
        if given and self.speculation is None and self.method is None:
            raise ConfigError(
                f"--{_FLAG}: {', '.join(given)} without a method drafts nothing; set method to "
                f"one of {', '.join(METHODS)}"
            )

    def _given(self, *but: str) -> list[str]:
        """The settings that are not as they were, by their names in the JSON."""
        return [
            each.name.removeprefix(_PREFIX)
            for each in fields(self)
            if each.name.startswith(_PREFIX)
            and each.name not in but
            and getattr(self, each.name) != each.default
        ]

    def _check_draft_model(self) -> None:
        method = self.speculative_method or (DRAFT_MODEL if self.speculative_model else None)
        if method == DRAFT_MODEL and not self.speculative_model:
            raise ConfigError(
                f"--{_FLAG}: method {DRAFT_MODEL} needs model, the directory, hub id or GGUF file "
                "of the draft model"
            )
        given = [name for name in ("model", "revision", "quantization") if name in self._given()]
        if given and method != DRAFT_MODEL:
            raise ConfigError(
                f"--{_FLAG}: {', '.join(given)} without method {DRAFT_MODEL} means nothing; leave "
                f"{'it' if len(given) == 1 else 'them'} out, or set method to {DRAFT_MODEL}"
            )

    @property
    def method(self) -> str | None:
        """What drafts; None where nothing does."""
        if self.speculation == "off":
            return None
        if self.speculative_method is None and self.speculative_model is not None:
            return DRAFT_MODEL
        return self.speculative_method or ("suffix" if self.speculation == "auto" else None)

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """The fewest and the most tokens that n-gram lookup looks up."""
        low, high = self.speculative_prompt_lookup_min, self.speculative_prompt_lookup_max
        if low is None:
            low = 2 if high is None else min(2, high)
        return low, max(5, low) if high is None else high

    @property
    def is_enabled(self) -> bool:
        """Whether tokens are guessed; those that grammars force are drafted without that."""
        return self.method is not None

    @property
    def max_draft_rows(self) -> int:
        """Rows that a step with drafts samples, at most; 0 where nothing drafts."""
        if self.speculation == "off":
            return 0
        default = _ROWS_OF_GUESSES if self.is_enabled else _ROWS_OF_FORCED_TOKENS
        return self.speculative_max_step_rows or default

    @property
    def max_drafters(self) -> int:
        """How many requests may be guessed for at once."""
        return _DRAFTERS_A_ROW * self.max_draft_rows

    @property
    def max_drafts(self) -> int:
        """Most drafts of one request in one step."""
        return max(0, self.max_draft_rows - 1)


def _refuse_other_methods(given: str | Mapping[str, object]) -> None:
    """Say of vLLM's other methods what there is in their place, and how a method is named."""
    if isinstance(given, str) and given in METHODS:
        raise ConfigError(
            f'--{_FLAG} {given} must be a JSON object: \'{{"method": "{given}"}}\', or give '
            f"--{_FLAG}.method {given}"
        )
    method = read_json(given, f"--{_FLAG}").get("method")
    if method is not None and method not in METHODS:
        raise ConfigError(f"--{_FLAG}: no method {method!r:.80}; have {', '.join(METHODS)}")
