"""How tokens are drafted that steps then verify, as JSON in vLLM's form or as flags."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.json_settings import take_in_json
from lora_serve.config.setting import require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

METHODS = ("ngram", "suffix")
_FLAG = "speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted that steps then verify. Answers are the same, to the bit."""

    speculative_method: str | None = setting(
        "Draft what an answer may go on with: by the request's own text (ngram), or also by past "
        "answers of the same adapter version, salt and API key (suffix); nothing if left out.",
        None,
        choices=METHODS,
        flag=f"{_FLAG}.method",
    )
    speculative_num_speculative_tokens: int = setting(
        "Most tokens that are drafted for one request in one step.",
        8,
        flag=f"{_FLAG}.num-speculative-tokens",
    )
    speculative_max_step_rows: int = setting(
        "Rows that a step's requests sample up to which drafts are added; the step is not filled "
        "beyond them.",
        16,
        flag=f"{_FLAG}.max-step-rows",
    )
    speculative_prompt_lookup_min: int = setting(
        "ngram: fewest tokens that must have stood before.",
        2,
        flag=f"{_FLAG}.prompt-lookup-min",
    )
    speculative_prompt_lookup_max: int = setting(
        "ngram: most tokens that are looked up.", 5, flag=f"{_FLAG}.prompt-lookup-max"
    )
    speculative_suffix_decoding_max_tree_depth: int = setting(
        "suffix: longest end of the text that counts.",
        24,
        flag=f"{_FLAG}.suffix-decoding-max-tree-depth",
    )
    speculative_suffix_decoding_max_spec_factor: float = setting(
        "suffix: tokens that are drafted for each token of the end that stood before.",
        1.0,
        flag=f"{_FLAG}.suffix-decoding-max-spec-factor",
    )
    speculative_suffix_decoding_max_cached_tokens: int = setting(
        "suffix: tokens of past answers that are kept, of all requests; 250 bytes each, about.",
        131_072,
        flag=f"{_FLAG}.suffix-decoding-max-cached-tokens",
    )
    speculative_config: str | None = setting(
        "The settings above as JSON in vLLM's form, such as "
        '{"method": "suffix", "num_speculative_tokens": 8}.',
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        take_in_json(self, "speculative_config", "speculative_")
        require_choices(self)
        num_tokens = self.speculative_num_speculative_tokens
        require_at_least(1, f"--{_FLAG}.num-speculative-tokens", num_tokens)
        require_at_least(2, f"--{_FLAG}.max-step-rows", self.speculative_max_step_rows)
        low, high = self.speculative_prompt_lookup_min, self.speculative_prompt_lookup_max
        require_at_least(1, f"--{_FLAG}.prompt-lookup-min", low)
        depth = self.speculative_suffix_decoding_max_tree_depth
        require_at_least(1, f"--{_FLAG}.suffix-decoding-max-tree-depth", depth)
        factor = self.speculative_suffix_decoding_max_spec_factor
        require_at_least(0, f"--{_FLAG}.suffix-decoding-max-spec-factor", factor)
        num_cached = self.speculative_suffix_decoding_max_cached_tokens
        require_at_least(0, f"--{_FLAG}.suffix-decoding-max-cached-tokens", num_cached)
        if high < low:
            raise ConfigError(
                f"--{_FLAG}: prompt_lookup_max {high} must be at least prompt_lookup_min {low}"
            )

    @property
    def is_enabled(self) -> bool:
        return self.speculative_method is not None

    @property
    def max_draft_rows(self) -> int:
        """Rows that a step with drafts samples, at most; 0 where nothing drafts."""
        return self.speculative_max_step_rows if self.is_enabled else 0
