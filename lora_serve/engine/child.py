"""What the engine's process runs. The API process names it, and imports nothing that it needs."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection

from lora_serve.config import EngineConfig
from lora_serve.errors import LoraServeError
from lora_serve.quiet_imports import without_collections

Orders = tuple[EngineConfig, str, str]  # with the addresses of messages and of replies


def run_engine_process(orders: Connection) -> None:
    """Import what an engine needs, then serve one API process until it says Shutdown, or is gone.

    orders: brings `Orders` at last, or ends without if no engine is wanted after all. To a
        configuration alone it is told why no engine can start so: a text, or None.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when to stop
    with without_collections():
        from lora_serve.worker.lean_torch import import_torch

        import_torch()
        from lora_serve.engine.core.process import run_engine
        from lora_serve.worker import worker  # noqa: F401  (torch and kernels, the longest part)

    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of its own"
    while True:
        multiprocessing.connection.wait([orders, parent.sentinel])
        try:
            order = orders.recv() if orders.poll() else None
        except EOFError:
            return
        if not isinstance(order, EngineConfig):
            break
        orders.send(_refusal(order))
    if order is not None:
        run_engine(*order)


def _refusal(config: EngineConfig) -> str | None:
    from lora_serve.engine.frontend.startup_checks import check_startup

    try:
        check_startup(config)
    except LoraServeError as error:
        return str(error)
    return None
