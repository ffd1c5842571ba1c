"""How answers are held to a grammar."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.json_settings import take_in_json
from lora_serve.config.setting import require_choices, setting
from lora_serve.errors import ConfigError

BACKENDS = ("auto", "llguidance", "xgrammar")
MAX_COMPILE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """How answers are held to a grammar."""

    structured_outputs_backend: str = setting(
        "Library that compiles grammars; auto is llguidance, xgrammar is an extra to install.",
        "auto",
        choices=BACKENDS,
        flag="structured-outputs-config.backend",
    )
    structured_outputs_compile_timeout: float = setting(
        "Seconds that compiling one grammar may take before its requests are refused with 400.",
        5.0,
        flag="structured-outputs-config.compile-timeout",
    )

    structured_outputs_enable_in_reasoning: bool = setting(
        "Make the reasoning of chats follow the grammar, too, not only what comes after it.",
        False,
        flag="structured-outputs-config.enable-in-reasoning",
    )

    structured_outputs_config: str | None = setting(
        'The settings above as JSON in vLLM\'s form, such as {"backend": "llguidance"}.',
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        take_in_json(self, "structured_outputs_config", "structured_outputs_")
        require_choices(self)
        seconds = self.structured_outputs_compile_timeout
        if not 0 < seconds <= MAX_COMPILE_SECONDS:
            raise ConfigError(
                f"--structured-outputs-config.compile-timeout {seconds} must be above 0 and at "
                f"most {MAX_COMPILE_SECONDS:g}"
            )

    @property
    def library(self) -> str:
        backend = self.structured_outputs_backend
        return "llguidance" if backend == "auto" else backend
