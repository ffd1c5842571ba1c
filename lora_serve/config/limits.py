"""How much may be queued, and how long an engine may stand still."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import read_quantities, require_at_least, setting

UNLIMITED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """How much may be queued before requests are refused, and how long an engine may hang."""

    max_num_queued_reqs: int = setting(
        "Most requests that may wait beyond the --max-num-seqs that run; more are refused with "
        "503. -1 for any number.",
        4096,
    )
    max_num_queued_tokens: int = setting(
        "Most prompt tokens of all requests that wait for their first output; more are refused "
        "with 503. -1 for any number.",
        8 * 2**20,
        quantity="count",
    )
    max_stream_backlog: int = setting(
        "Pieces of a streamed answer that may wait for a slow reader; with more, it is aborted.",
        4096,
    )
    restart_wait: float = setting(
        "Seconds that a new request waits for an engine that is being restarted, before it gets "
        "503.",
        5.0,
    )
    engine_ready_timeout: float = setting(
        "Seconds in which an engine process must load its model before it is killed; 0 for no "
        "limit. Without the flag, VLLM_ENGINE_READY_TIMEOUT_S in the environment sets it.",
        600.0,
    )
    step_timeout: float = setting(
        "Seconds without a finished step, while requests wait, after which /health fails and an "
        "engine that does not reply at all is killed and restarted. Ranks wait as long for each "
        "other. 0 for never.",
        120.0,
    )

    def __post_init__(self) -> None:
        read_quantities(self)
        require_at_least(UNLIMITED, "--max-num-queued-reqs", self.max_num_queued_reqs)
        if self.max_num_queued_tokens != UNLIMITED:
            require_at_least(1, "--max-num-queued-tokens", self.max_num_queued_tokens)
        require_at_least(1, "--max-stream-backlog", self.max_stream_backlog)
        require_at_least(0, "--restart-wait", self.restart_wait)
        require_at_least(0, "--engine-ready-timeout", self.engine_ready_timeout)
        require_at_least(0, "--step-timeout", self.step_timeout)
