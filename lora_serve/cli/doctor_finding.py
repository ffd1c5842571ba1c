"""What `lora-serve doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is. ERROR: no server can start."""

    FACT = "fact"
    HINT = "hint"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """remedy: what to do; empty where nothing has to be done."""

    subject: str
    told: str
    level: Level = Level.FACT
    remedy: str = ""
