"""Imports torch for an engine, in less time, and so that its threads leave the cores to others.

Without its rules for tensors that have no numbers, a third of its import: they say in Python what
shapes operators give, which compilers ask, and modules that are built before their weights are
read. Who needs them imports them: `import torch._meta_registrations`. And with threads that sleep
where they have nothing to do: by default they spin for a millisecond after each operator, beside
the kernels' own threads and the server. Only for processes of our own: a user's program may count
on both. And only for versions of torch that were tried: another may import a name of these rules.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from types import ModuleType

_RULES = "torch._meta_registrations"
_TRIED = ("2.11.", "2.12.", "2.13.")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # either, if the user says how threads wait


def import_torch() -> None:
    """Import it for good, for this process; nothing changes where it has been already."""
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in _WAITING):
        os.environ[_WAITING[0]] = "PASSIVE"
    if not version("torch").startswith(_TRIED):
        return
    sys.modules[_RULES] = ModuleType(_RULES)  # what torch finds instead
    try:
        import torch
    finally:
        del sys.modules[_RULES]
    vars(torch).pop(_RULES.rpartition(".")[2], None)
    bind = getattr(torch._C, "_set_generator_metaclass", None)
    if bind is not None:  # the rules do it, and before that no torch.Generator can be made
        from torch._opaque_base import OpaqueBaseMeta

        bind(OpaqueBaseMeta)
