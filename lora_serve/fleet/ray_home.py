"""Where a Ray of the server's own keeps its sessions, sockets and logs, and for how long.

Ray itself leaves a session of some megabytes in /tmp/ray at each end.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from lora_serve.errors import ConfigError
from lora_serve.private_directory import PrivateDirectory

logger = logging.getLogger(__name__)

_PREFIX = "lora-serve-ray-"
_KEPT_PREFIX = "logs-of-lora-serve-ray-"  # which no later start takes for a directory left behind
_MOST_CHARS = 40  # of its path: those of the sockets below it are at most 107 long


class RayHome:
    """A directory for its user alone that is there within `with`; a killed owner's goes at a start.

    At its end Ray must have ended. The logs stay if an error ends it that says too little: one of
    no user's, or any if `explains_nothing` was set.
    """

    def __init__(self) -> None:
        self.explains_nothing = False
        self._directory = PrivateDirectory(_PREFIX, _parent())

    @property
    def path(self) -> Path:
        return self._directory.path

    def __enter__(self) -> RayHome:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        is_explained = isinstance(error, ConfigError) and not self.explains_nothing
        try:
            if isinstance(error, Exception) and not is_explained:
                self._keep_logs()
        finally:
            self._directory.close()

    def _keep_logs(self) -> None:
        logs = next(self.path.glob("session_2*/logs"), None)
        if logs is not None:
            kept = tempfile.mkdtemp(prefix=_KEPT_PREFIX, dir=self.path.parent)
            logger.error("Ray's logs are kept in %s", shutil.move(logs, kept))


def _parent() -> Path:
    """Where Ray would put it, too, unless the path is too long for sockets."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    is_short = len(parent) + len(f"/{_PREFIX}12345678") <= _MOST_CHARS
    return Path(parent if is_short else "/tmp")
