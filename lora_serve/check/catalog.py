"""All probes, in the order in which they run: what later ones build on comes first."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.check.probe import Probe
from lora_serve.check.probes import (
    admin,
    at_once,
    exactness,
    isolation,
    pressure,
    reload,
    running,
)
from lora_serve.errors import ConfigError

PROBES: tuple[Probe, ...] = (
    *exactness.PROBES,
    *isolation.PROBES,
    *reload.PROBES,
    *running.PROBES,
    *at_once.PROBES,
    *pressure.PROBES,
    *admin.PROBES,
)


def chosen(names: Sequence[str]) -> tuple[Probe, ...]:
    """The probes of these names, in the usual order; all if there are none.

    Raises:
        ConfigError: a name that no probe has.
    """
    known = {probe.name for probe in PROBES}
    for name in names:
        if name not in known:
            raise ConfigError(f"--probe {name} is not one of {', '.join(sorted(known))}")
    return tuple(probe for probe in PROBES if not names or probe.name in names)
