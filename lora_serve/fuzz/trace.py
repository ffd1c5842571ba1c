"""A trace: how a server is set up, and what is done to it, in order. Plain data, kept as JSON.

Everything that an answer depends on is in it, so that the same trace asks the same questions of
another server. When things happen depends on the server, too: events begin in order, each
`wait_ms` after the one before, and not before one of the trace's `concurrency` places is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lora_serve.errors import ConfigError
from lora_serve.identity import BASE_MODEL, EVERYTHING, Everything, NoAdapter
from lora_serve.pooling import PoolingParams
from lora_serve.sampling_params import SamplingParams


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    token_ids: tuple[int, ...]


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Embeds(msgspec.Struct, frozen=True, tag="embeds"):
    """Runs of random rows as (seed, number of rows); each is the first rows of its seed."""

    runs: tuple[tuple[int, int], ...]


class Chat(msgspec.Struct, frozen=True, tag="chat"):
    """A conversation: (role, content) of each message."""

    messages: tuple[tuple[str, str], ...]


Prompt = Tokens | Text | Embeds | Chat
API_KEYS = ("first", "second")  # of a server that is started for a trace
Route = Literal["chat", "responses", "messages"]


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversation asks for beyond its messages.

    tools: names among `TOOLS` of `fuzz/talks.py`. tool_choice: auto, none, required, or one name.
    stored_as: the label of a response that is stored. continues: the label of the one that comes
        before this; where that has not been answered, the conversation begins here.
    """

    route: Route = "chat"
    tools: tuple[str, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    stored_as: str = ""
    continues: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """One request.

    lora_name: null in the file for the base model; `adapter` says it in the code.
    api_key: the place among API_KEYS of the one that it is sent with.
    pooling: asks for an embedding instead of an answer; its pooling_type is the server's, or ALL.
    leaves_after_tokens: the client hangs up once so many have been streamed; leaves_after_ms: or
        after so long, whether anything has come or not. On routes that tell no tokens while they
        stream, events count as tokens.
    kv_transfer: what it asks of its KV on another server's account, "" for nothing.
    """

    prompt: Prompt
    params: SamplingParams
    lora_name: str | None = None
    api_key: int = 0
    cache_salt: str = ""
    priority: int = 0
    is_streamed: bool = False
    leaves_after_tokens: int | None = None
    leaves_after_ms: int | None = None
    wait_ms: int = 0
    pooling: PoolingParams | None = None
    talk: Talk | None = None
    kv_transfer: Literal["", "do_remote_decode", "do_remote_prefill"] = ""

    @property
    def adapter(self) -> str | NoAdapter:
        return BASE_MODEL if self.lora_name is None else self.lora_name


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load a version under a name.

    place: a path of the name's own, to which the version's bytes are written first, over those of
    earlier versions; "" loads from the library's directory.
    in_place: whether it may replace an adapter of that name; if not, it is refused then.
    """

    lora_name: str
    version: int
    place: str = ""
    in_place: bool = True
    wait_ms: int = 0


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    lora_name: str
    wait_ms: int = 0


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag="reset"):
    """Reset the prefix cache: all of it (null in the file), or one adapter's."""

    lora_name: str | None = None
    wait_ms: int = 0

    @property
    def scope(self) -> str | Everything:
        return EVERYTHING if self.lora_name is None else self.lora_name


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End the newest requests that have been sent, so many of them, or all (null in the file)."""

    newest: int | None = None
    wait_ms: int = 0


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Kill the engine process with SIGKILL; the next event waits until there is another."""

    wait_ms: int = 0


class PauseAndResume(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Pause the server, and resume it `pause_ms` after the pause was confirmed."""

    mode: Literal["keep", "wait"]
    pause_ms: int = 0
    wait_ms: int = 0


class Damage(msgspec.Struct, frozen=True, kw_only=True, tag="damage"):
    """Flip, cut off or delete some of the disk tier's files, chosen by the seed."""

    seed: int
    wait_ms: int = 0


AdapterCall = Load | Unload | Reset


class ConcurrentCalls(msgspec.Struct, frozen=True, kw_only=True, tag="concurrent_calls"):
    """Two or three admin calls that are sent at once; the server may take them in any order.

    Their loads have no `place`: files that two calls write at once are neither's.
    """

    calls: tuple[AdapterCall, ...]
    wait_ms: int = 0

    def __post_init__(self) -> None:
        if any(isinstance(call, Load) and call.place for call in self.calls):
            raise ValueError("loads among concurrent calls cannot have a place")


Event = Ask | AdapterCall | Abort | Kill | PauseAndResume | Damage | ConcurrentCalls


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All of a trace. flags: the server's. tiers: which of ram, disk and redis it has.

    model: one of SMALL_MODELS of `fuzz/small_models.py`; "" for the run's own.
    """

    seed: int
    model: str = ""
    flags: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    concurrency: int = 16
    events: tuple[Event, ...]

    @property
    def num_requests(self) -> int:
        return sum(isinstance(event, Ask) for event in self.events)

    def aborted_by(self, event: int) -> Sequence[int]:
        """The requests, as indices of events, that the Abort at this index names."""
        abort = self.events[event]
        assert isinstance(abort, Abort), f"event {event} names no requests"
        asked = [index for index in range(event) if isinstance(self.events[index], Ask)]
        return asked if abort.newest is None else asked[len(asked) - abort.newest :]

    @property
    def loads(self) -> list[Load]:
        """All loads, those among concurrent calls too."""
        return [
            call
            for event in self.events
            for call in (event.calls if isinstance(event, ConcurrentCalls) else (event,))
            if isinstance(call, Load)
        ]


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The params of an answer of fewer tokens, whatever had to come before its end."""
    least = min(params.min_tokens, max_tokens)
    return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=least)


def save_trace(trace: Trace, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(trace), indent=1) + b"\n")


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError for a file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trace)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no trace: {error}") from error
