"""How much may run at once, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import read_quantities, require_at_least, require_choices, setting

SCHEDULING_POLICIES = ("fcfs", "priority")
FAIR_SHARES = ("none", "adapter", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much may run at once, and in which order."""

    max_num_seqs: int = setting("Most requests that run at once.", 128)
    max_num_batched_tokens: int = setting(
        "Most tokens computed in one step.", 2048, quantity="count"
    )
    scheduling_policy: str = setting(
        "Order of waiting requests: by arrival, or by priority (lower first) and then arrival.",
        "fcfs",
        choices=SCHEDULING_POLICIES,
    )
    fair_share: str = setting(
        "Give adapters, or API keys, equal shares of the tokens computed while they wait for each "
        "other, and let none fill a bounded queue alone; none serves in the order above alone.",
        "none",
        choices=FAIR_SHARES,
    )
    async_scheduling: bool | None = setting(
        "Plan and build a step while the one before it runs; on for GPUs and off for CPUs if left "
        "out.",
        None,
    )
    validate: bool = setting("Check the engine's invariants after every step (slow).", False)

    def __post_init__(self) -> None:
        read_quantities(self)
        require_choices(self)
        require_at_least(1, "--max-num-seqs", self.max_num_seqs)
        require_at_least(1, "--max-num-batched-tokens", self.max_num_batched_tokens)
