"""The door for tiers: what a kind of tier is to those who open, check and inspect it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lora_serve.config import KVTierConfig
from lora_serve.kv_tiers.base import Tier
from lora_serve.kv_tiers.inspection import Inspection
from lora_serve.kv_tiers.mac import MacKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPlace:
    """What `lora-serve kv` was asked to look into, and with what."""

    where: str
    keys: MacKeys
    password_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind:
    """One kind of tier; a module of this folder has one as KIND.

    name: as its tiers' own. is_named: whether the settings ask for one. check: refuse settings
    that can never work, before the model is read. open: it may be unusable now. inspect: None for
    another kind's place, and for all places of a tier that ends with its process. places: what
    those that it inspects look like. All raise ConfigError, naming the setting; `keys` sign what
    others can write, too.
    """

    name: str
    is_named: Callable[[KVTierConfig], bool]
    check: Callable[[KVTierConfig, MacKeys], None]
    open: Callable[[KVTierConfig, MacKeys], Tier]
    inspect: Callable[[InspectedPlace], Inspection | None]
    places: str = ""
