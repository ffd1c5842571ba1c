"""How lines of the log look, in the server's process and in the engine's."""

from __future__ import annotations

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
