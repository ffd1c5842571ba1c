"""What the log tells, and how its lines look."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_choices, setting

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The log of all processes of a server. It goes to stderr; to rotate it is left to others."""

    log_level: str = setting(
        "Least severe lines that are logged.",
        "info",
        choices=LEVELS,
        spellings={level.upper(): level for level in LEVELS},
    )
    log_format: str = setting(
        "Lines for readers, or a JSON object a line for programs.", "text", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        require_choices(self)
