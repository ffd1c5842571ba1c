"""A setting: a field of a configuration, with the help of its flag, and how it is checked."""

from __future__ import annotations

from dataclasses import Field, field, fields
from typing import Any

from lora_serve.config.quantities import READERS
from lora_serve.errors import ConfigError


def setting(help: str, default: Any, *, is_secret: bool = False, **metadata: Any) -> Any:
    """A field with its flag's help; `metavar` and `repeat` go to the parser.

    `flag` is the flag's name where it is not the field's. Secrets are left out of reprs, because
    libraries write these into logs and errors.
    `choices` are the values it may have besides a default of None. The parser lists them, and
    `require_choices` refuses others, from wherever they come. `spellings` are other words for some
    of them. `aliases` are further names of its flag. A number with a `quantity` may be a text that
    `quantities.py` reads, such as 16K or 8GiB, which `read_quantities` turns into the number.
    """
    return field(default=default, repr=not is_secret, metadata={"help": help, **metadata})


def flag_name(setting: Field[Any]) -> str:
    """The name of a setting's flag, without dashes before it."""
    return str(setting.metadata.get("flag") or setting.name.replace("_", "-"))


def require_at_least(low: float, flag: str, value: float | None) -> None:
    if value is not None and not value >= low:  # nor is NaN
        raise ConfigError(f"{flag} {value} must be at least {low}")


def require_at_most(high: float, flag: str, value: float | None) -> None:
    if value is not None and value > high:
        raise ConfigError(f"{flag} {value} must be at most {high}")


def read_quantities(config: Any) -> None:
    """Turn texts into the numbers that they stand for. Every config with quantities calls it.

    Raises:
        ConfigError: naming the flag, for a text that stands for none.
    """
    for each in fields(config):
        text = getattr(config, each.name)
        if "quantity" not in each.metadata or not isinstance(text, str):
            continue
        try:
            number = READERS[each.metadata["quantity"]](text)
        except ValueError as error:
            raise ConfigError(f"--{flag_name(each)}: {error}") from error
        object.__setattr__(config, each.name, number)  # it is being made, and not yet shared


def require_choices(config: Any) -> None:
    """Refuse values that are none of their fields' choices. Every config with choices calls it.

    A value that is another spelling of a choice becomes that choice.
    """
    for each in fields(config):
        spellings = each.metadata.get("spellings", {})
        if getattr(config, each.name) in spellings:
            meant = spellings[getattr(config, each.name)]
            object.__setattr__(config, each.name, meant)  # it is being made, and not yet shared
        choices, value = each.metadata.get("choices"), getattr(config, each.name)
        if choices is None or value in choices or (value is None and each.default is None):
            continue
        raise ConfigError(f"--{flag_name(each)} {value} must be one of {', '.join(choices)}")
