"""The API process's end of an engine process: starts it, talks to it, notices its death."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import zmq
import zmq.asyncio

from lora_serve.config import EngineConfig
from lora_serve.engine import wire
from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.engine.frontend.message_reader import MessageReader
from lora_serve.engine.frontend.socket_directory import SocketDirectory
from lora_serve.errors import EngineDeadError
from lora_serve.messages import (
    EngineEnds,
    EngineMessage,
    EngineReady,
    EngineReply,
    RanksLate,
    Shutdown,
)

SHUTDOWN_SECONDS = 10.0
EXIT_SECONDS = 1.0  # between the end of a process and the news of how it ended
_CAUSES: Mapping[int, str] = MappingProxyType(  # by the signal that says something of it
    {
        signal.SIGKILL: "usually the system was out of memory: dmesg, or the container's "
        "OOMKilled, would say so",
        signal.SIGBUS: "a file that it had mapped was cut, or its disk cannot be read or is full: "
        "see that nothing changes --weights-cache-path, the checkpoint and /dev/shm meanwhile",
    }
)


class EngineClient:
    """One engine process. `start`, then `send` and `receive`, then `close`."""

    def __init__(self, process: EngineProcess | None = None) -> None:
        """process: one that was spawned and is this client's now; else `start` spawns one."""
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._messages = zmq.asyncio.Context.shadow(self._context).socket(zmq.PUSH)
        self._replies = self._context.socket(zmq.PULL)
        self._messages.set_hwm(0)
        self._replies.set_hwm(0)
        self._reader = MessageReader(self._replies)
        self._encoder = wire.encoder()
        self._decoder = wire.reply_decoder()
        self._process = process or EngineProcess()
        self._is_ready = False
        self._late_ranks: tuple[int, ...] = ()
        self._reason = ""  # why it ends, where it has said so
        self._has_died = False

    @property
    def is_alive(self) -> bool:
        return self.pid is not None and not self._has_died

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def start(self, config: EngineConfig) -> EngineReady:
        """Start the process and wait for its model.

        Raises:
            ConfigError: or whatever else the engine refused to start with.
            EngineDeadError: it died before it was ready, or was not in --engine-ready-timeout.
        """
        message_address = f"ipc://{self._directory.path}/messages"
        reply_address = f"ipc://{self._directory.path}/replies"
        self._messages.bind(message_address)
        self._replies.bind(reply_address)
        self._reader.open()
        process = self._process
        if process.pid is None:
            process.spawn()
        asyncio.get_running_loop().add_reader(process.sentinel, self._note_death)
        with suppress(OSError):  # it has died; `receive` tells how
            process.run(config, message_address, reply_address)
        seconds = config.limits.engine_ready_timeout
        try:
            async with asyncio.timeout(seconds or None):
                ready = await self.receive()
        except TimeoutError:
            raise EngineDeadError(_not_ready(config, self._late_ranks)) from None
        assert isinstance(ready, EngineReady), f"first reply is {type(ready).__name__}"
        if ready.error is not None:
            raise wire.error_from_info(ready.error)
        self._is_ready = True
        return ready

    async def send(self, message: EngineMessage) -> None:
        """Raises EngineDeadError once the process is gone, also while this waits for it."""
        if not self.is_alive:
            raise EngineDeadError(self._story())
        try:
            await self._messages.send(self._encoder.encode(message), copy=False)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A message that nobody takes is cancelled when its socket is closed.
            raise EngineDeadError(self._story()) from None

    async def receive(self) -> EngineReply:
        """The next reply. Raises EngineDeadError once the process is gone."""
        while isinstance(reply := await self._next_reply(), RanksLate | EngineEnds):
            if isinstance(reply, EngineEnds):
                self._reason = reply.reason
            else:
                self._late_ranks = reply.ranks
        return reply

    async def _next_reply(self) -> EngineReply:
        message = await self._reader.next()
        if message is None:
            await asyncio.to_thread(self._process.join, EXIT_SECONDS)  # to know how it ended
            raise EngineDeadError(self._story())
        return self._decoder.decode(message)

    async def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self.pid is not None:
            await asyncio.to_thread(self._process.kill)
            self._note_death()

    async def close(self) -> None:
        """Ask the process to end, wait a little, end it otherwise."""
        if self._is_ready and self.is_alive:  # before, it would not be listening yet
            with suppress(TimeoutError):  # it has just died, and takes no message
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await self.send(Shutdown())
            await asyncio.to_thread(self._process.join, SHUTDOWN_SECONDS)
        await self.kill()
        self._process.close()
        self._reader.close()
        self._messages.close(linger=0)
        self._context.destroy(linger=0)
        self._directory.close()

    def _story(self) -> str:
        """How the process ended, in a sentence."""
        if self._reason:
            return f"the engine has ended: {self._reason}"
        code = self._process.exit_code
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = "has died" if code is None else f"ended with exit code {code}"
        when = "" if self._is_ready else " while it started"
        return f"the engine process {how}{when}; {likely_cause(code)}"

    def _note_death(self) -> None:
        if not self._has_died:
            asyncio.get_running_loop().remove_reader(self._process.sentinel)
            self._has_died = True
            self._reader.end()


def _not_ready(config: EngineConfig, late_ranks: Sequence[int]) -> str:
    """What an engine was waited for in vain, and what to do. late_ranks: if any are known."""
    told = f"the engine process was not ready in {config.limits.engine_ready_timeout:g} s"
    remedy = f"see that the disk of {config.model.model} answers"
    num_ranks = config.parallel.tensor_parallel_size
    if late_ranks:
        is_one = len(late_ranks) == 1
        names = f"rank{'s' * (not is_one)} {', '.join(map(str, late_ranks))}"
        told += f": the other ranks were waiting for {names}"
        remedy += f" and that nothing else takes {'its' if is_one else 'their'} cores"
    elif num_ranks > 1:
        told += f", and none of its {num_ranks} ranks is known to be later than the others"
    return f"{told}; {remedy}, or raise --engine-ready-timeout"


def likely_cause(exit_code: int | None) -> str:
    """Why a process may have ended so. exit_code: negative for a signal, None if not known."""
    return _CAUSES.get(-(exit_code or 0), "the server's log may tell why")
