"""A request that drafts: its drafter and its pace."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.speculation.base import RequestDrafter
from lora_serve.speculation.pace import DraftPace


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """What guesses the tokens that follow, and how many of them are tried."""

    drafter: RequestDrafter
    pace: DraftPace
