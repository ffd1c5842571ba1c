"""What the engine's process runs. The API process names it, and imports nothing that it needs."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection

from lora_serve.config import EngineConfig

Orders = tuple[EngineConfig, str, str]  # with the addresses of messages and of replies


def run_engine_process(orders: Connection) -> None:
    """Import what an engine needs, then serve one API process until it says Shutdown, or is gone.

    orders: brings one `Orders`, or ends without if no engine is wanted after all.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when to stop
    from lora_serve.engine.core.process import run_engine
    from lora_serve.worker import worker  # noqa: F401  (torch and kernels, the longest part)

    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of its own"
    multiprocessing.connection.wait([orders, parent.sentinel])
    try:
        if orders.poll():
            run_engine(*orders.recv())
    except EOFError:
        return
