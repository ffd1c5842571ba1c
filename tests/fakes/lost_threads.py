"""An engine's process one of whose threads meets a bug: `python -m tests.fakes.lost_threads NAME`.

Each fault is put where the thread's own care for errors does not reach. A process that survives it
ends with 0 after SURVIVAL_SECONDS.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path

import zmq

from lora_serve.adapters.lanes import LoadJob
from lora_serve.adapters.loader import AdapterLoader
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import AdapterThreads
from lora_serve.config import EngineConfig, KVEventsConfig, LoRAConfig
from lora_serve.engine.core import process
from lora_serve.engine.core.kv_event_publisher import EventPublisher
from lora_serve.identity import AdapterRef
from lora_serve.kv_tiers.base import Drop
from lora_serve.kv_tiers.deadlines import Deadlines
from lora_serve.kv_tiers.disk.index import DiskIndex
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.save_queue import SaveQueue
from lora_serve.kv_tiers.store import TieredStore
from lora_serve.messages import EngineReady
from lora_serve.observability.lost_threads import exit_with_any_thread
from tests.fakes.kv_blocks import a_namespace, chain

SURVIVAL_SECONDS = 10.0


class Bug(BaseException):
    """Passes the guards of threads that outlive an exception."""


def bug(*_: object, **__: object) -> None:
    raise Bug("a bug")


class IdleCore:
    """An EngineCore that has nothing to do."""

    idle_seconds = None

    def ready(self) -> EngineReady:
        return EngineReady()

    def step(self) -> bool:
        return False

    def take_replies(self) -> list[object]:
        return []


class FaultyCore(IdleCore):
    def step(self) -> bool:
        raise Bug("a bug")


class FakeExecutor:
    def load(self) -> None:
        return None


def run_engine(core: IdleCore, message: bytes | None = None) -> None:
    """The engine's process itself, over a core of ours; it may be sent one message."""
    process.make_executor = lambda *_: FakeExecutor()  # type: ignore[assignment]
    process.build_engine_core = lambda *_, **__: core  # type: ignore[assignment]
    directory = tempfile.mkdtemp()
    addresses = [f"ipc://{directory}/{name}" for name in ("messages", "replies")]
    messages = zmq.Context.instance().socket(zmq.PUSH)
    messages.bind(addresses[0])
    if message is not None:
        _send(messages, message)
    process.run_engine(EngineConfig(), *addresses)


def _send(messages: zmq.Socket[bytes], message: bytes) -> None:
    sending = threading.Thread(target=messages.send, args=(message,), daemon=True)
    sending.start()  # it waits for the engine


def lose_receiver() -> None:
    threading.Timer(SURVIVAL_SECONDS, os._exit, (0,)).start()  # the engine waits for ever
    run_engine(IdleCore(), b"no message")


def lose_engine_thread() -> None:
    core = FaultyCore()
    core.idle_seconds = 0.0  # type: ignore[assignment]
    run_engine(core)


def lose_parent_watch() -> None:
    connection.wait = bug  # type: ignore[assignment]
    multiprocessing.process._parent_process = type("Parent", (), {"sentinel": 0})()  # type: ignore[attr-defined]
    process._exit_with_parent()


def lose_adapter_read() -> None:
    loader = AdapterLoader(LoRAConfig(), AdapterSource(bug, bug, bug), bug, bug, AdapterThreads())  # type: ignore[arg-type]
    loader.submit(LoadJob("/a", ref=AdapterRef("a", b"")))


def lose_adapter_prepare() -> None:
    AdapterThreads().prepare(bug)


def lose_kv_deadlines() -> None:
    Deadlines(bug).add(0.0, 1)


def lose_kv_encode() -> None:
    SaveQueue.take = bug  # type: ignore[assignment,method-assign]
    TieredStore([], bug)


def lose_kv_ram_load() -> None:
    RamTier.may_hold = lambda *_: True  # type: ignore[assignment,method-assign]
    namespace = a_namespace()
    TieredStore([RamTier(2**20)], bug).fetch(1, namespace, chain(namespace, "prompt", 1), 5.0)


def lose_kv_ram_save() -> None:
    store = TieredStore([RamTier(2**20)], bug)
    store.drop(Drop(b"model"))


def lose_kv_disk_scan() -> None:
    DiskIndex.sort = bug  # type: ignore[method-assign,assignment]
    DiskTier(Path(tempfile.mkdtemp()), 2**20)


def lose_kv_events() -> None:
    settings = KVEventsConfig(kv_events_endpoint=f"ipc://{tempfile.mkdtemp()}/events")
    publisher = EventPublisher(settings)
    publisher.start(bug)
    publisher.publish([])


LOSSES: dict[str, Callable[[], None]] = {
    "receiver": lose_receiver,
    "parent-watch": lose_parent_watch,
    "adapter-read": lose_adapter_read,
    "adapter-prepare": lose_adapter_prepare,
    "kv-deadlines": lose_kv_deadlines,
    "kv-encode": lose_kv_encode,
    "kv-ram-load": lose_kv_ram_load,
    "kv-ram-save": lose_kv_ram_save,
    "kv-disk-scan": lose_kv_disk_scan,
    "kv-events": lose_kv_events,
}


def main(name: str) -> None:
    if name == "the engine's":
        lose_engine_thread()
    exit_with_any_thread("the engine")
    LOSSES[name]()
    time.sleep(SURVIVAL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
