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
        "Give adapters, or API keys, equal shares of the computed tokens while they compete, and "
        "let none of them fill a bounded queue alone; none uses only the order above.",
        "none",
        choices=FAIR_SHARES,
    )
    async_scheduling: bool | None = setting(
        "Plan and build a step while the previous one runs; by default on for GPUs and off for "
        "CPUs.",
        None,
    )
    validate: bool = setting("Check the engine's invariants after every step (slow).", False)

    def __post_init__(self) -> None:
        read_quantities(self)
        require_choices(self)
        require_at_least(1, "--max-num-seqs", self.max_num_seqs)
        require_at_least(1, "--max-num-batched-tokens", self.max_num_batched_tokens)
