"""Names the users that files belong to, for messages."""

from __future__ import annotations

import pwd


def user_name(user: int) -> str:
    """The name of a user id; "uid N" if the system knows none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"uid {user}"
