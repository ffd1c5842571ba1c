"""The environment of servers whose start is timed."""

from __future__ import annotations

import os


def as_users_have_it() -> dict[str, str]:
    """This process's, with which Python keeps what it compiles, or each start compiles it all."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
