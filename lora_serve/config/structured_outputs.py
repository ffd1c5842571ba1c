"""How answers are held to a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from lora_serve.config.setting import require_choices, setting
from lora_serve.errors import ConfigError

BACKENDS = ("auto", "llguidance", "xgrammar")
MAX_COMPILE_SECONDS = 600.0
_FLAG = "--structured-outputs-config"
_PREFIX = "structured_outputs_"


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
        "Hold the reasoning of chats to the grammar, too, instead of what follows it alone.",
        False,
        flag="structured-outputs-config.enable-in-reasoning",
    )

    structured_outputs_config: str | None = setting(
        'The settings above as JSON in vLLM\'s form, such as {"backend": "llguidance"}.',
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        self._take_in_json()
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

    def _take_in_json(self) -> None:
        """Set what the JSON says; it is then as if flags had said it."""
        if self.structured_outputs_config is None:
            return
        own = {each.name.removeprefix(_PREFIX): each for each in fields(self)}
        del own["config"]
        for name, value in _read_json(self.structured_outputs_config).items():
            if name not in own:
                raise ConfigError(f"{_FLAG}: no setting {name}; have {', '.join(own)}")
            default = own[name].default
            if type(value) is int and isinstance(default, float):
                value = float(value)
            if type(value) is not type(default):
                raise ConfigError(
                    f"{_FLAG}: {name} {value!r} must be a {type(default).__name__}, as {default!r}"
                )
            if getattr(self, own[name].name) not in (default, value):
                raise ConfigError(f"{_FLAG}: {name} is given as a flag, too; give one of them")
            object.__setattr__(self, own[name].name, value)  # it is being made, and not yet shared
        object.__setattr__(self, "structured_outputs_config", None)


def _read_json(text: str) -> dict[str, object]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{_FLAG} {text[:80]!r} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG} {text[:80]!r} must be a JSON object")
    return given
