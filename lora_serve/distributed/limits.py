"""How long ranks wait for each other, and which flags say so."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config import LimitsConfig

NO_LIMIT_SECONDS = 24 * 3600.0  # where a flag is 0


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Seconds that are waited. flag: which raises them; empty where none does."""

    seconds: float
    flag: str = ""

    def __str__(self) -> str:
        """Say how long was waited in vain, and what to do."""
        told = f"{self.seconds:g} s"
        return f"{told}; raise {self.flag} if it may take longer" if self.flag else told


@dataclass(frozen=True, slots=True)
class RankLimits:
    """step: for all that is asked of a rank that serves. load: for what ranks agree on before."""

    step: TimeLimit
    load: TimeLimit

    @property
    def longest(self) -> float:
        """The seconds of the longer one."""
        return max(self.step.seconds, self.load.seconds)


def rank_limits(limits: LimitsConfig) -> RankLimits:
    """One rank may load for as long as the engine may."""
    return RankLimits(
        TimeLimit(limits.step_timeout or NO_LIMIT_SECONDS, "--step-timeout"),
        TimeLimit(limits.engine_ready_timeout or NO_LIMIT_SECONDS, "--engine-ready-timeout"),
    )
