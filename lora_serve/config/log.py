"""What the log tells, and how its lines look."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, require_choices, setting

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
        "Text lines for people, or one JSON object per line for programs.",
        "text",
        choices=("text", "json"),
    )

    disable_log_requests: bool = setting(
        "Leave out the line for each request that generates: key, adapter version, tokens, times "
        "and how it ended.",
        False,
        aliases=("--no-enable-log-requests", "--disable-uvicorn-access-log"),
    )
    log_prompts: bool = setting("Show prompts and answers in these lines.", False)
    max_log_len: int = setting("Most characters shown of a prompt, and of an answer.", 1000)
    disable_log_stats: bool = setting(
        "Leave out the line with throughput that is written regularly while there is work.", False
    )
    log_stats_interval: float = setting("Seconds between two of these lines.", 10.0)

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(0, "--max-log-len", self.max_log_len)
        require_at_least(0.1, "--log-stats-interval", self.log_stats_interval)
