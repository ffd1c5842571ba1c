"""Finds out what a server is and can do, by asking; no documentation is trusted.

A field that a server does not know may be refused or passed over in silence: which of the two
decides what may be concluded from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from lora_serve.check.answers import Answer
from lora_serve.check.findings import JsonObject
from lora_serve.check.server import Server, ServerFaultError
from lora_serve.demo.corpus import long_prompt
from lora_serve.errors import ConfigError

# Wanted in every request, and left out where a server refuses them.
EXTRAS: Mapping[str, object] = {"logprobs": 5, "seed": 0, "ignore_eos": True}
REFUSED = (400, 404, 405, 422, 501)
RESET_ROUTES = ("/reset_prefix_cache", "/flush_cache")
SAMPLE_LINES = 8
TOKENS_PER_LINE = 25.0  # where the server counts none


class ColdWay(Enum):
    """How a server can be asked so that nothing comes from its cache."""

    NO_CACHE = "the server caches nothing"
    SALT = "a cache_salt of its own"
    CACHE_PROMPT = "cache_prompt: false"
    RESET = "a reset of the cache before"
    NONE = "no way; a prompt is new when it is asked first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """model: as requests call it. adapters: those that it serves already. root: its directory.

    extras: fields of every request. lines: of a usual prompt. tells_cached: whether usage counts
    cached tokens. has_hits: whether an equal prompt hit. reset_route: "" if there is none.
    """

    model: str
    adapters: tuple[str, ...] = ()
    root: str = ""
    max_model_len: int = 0
    extras: Mapping[str, object] = field(default_factory=dict)
    lines: int = 24
    tokens_per_line: float = TOKENS_PER_LINE
    has_logprobs: bool = False
    tells_cached: bool = False
    has_hits: bool = False
    knows_salts: bool = False
    cold_way: ColdWay = ColdWay.NONE
    reset_route: str = ""

    def lines_for(self, num_tokens: int) -> int:
        """How many make so many tokens, or half of the context, which leaves room for an answer."""
        if self.max_model_len:
            num_tokens = min(num_tokens, self.max_model_len // 2)
        return max(1, int(num_tokens / self.tokens_per_line))

    def is_room_for(self, num_tokens: int) -> bool:
        """Whether the context is known to hold such an answer behind any prompt of ours."""
        return num_tokens <= self.max_model_len // 2


@dataclass(frozen=True, slots=True)
class Card:
    """What /v1/models says of one model or adapter."""

    id: str
    parent: str
    root: str
    max_model_len: int


async def discover(server: Server, model: str, num_prompt_tokens: int, nonce: str) -> Facts:
    """All facts.

    Raises:
        ConfigError: the server cannot be asked at all; says what it answered.
    """
    cards = await _cards(server)
    base = _base(cards, model)
    adapters = tuple(card.id for card in cards if card.parent and card.id != base.id)
    try:
        extras, sample = await _extras(server, base.id, nonce)
        facts = Facts(
            model=base.id,
            adapters=adapters,
            root=base.root,
            max_model_len=base.max_model_len,
            extras=extras,
            tokens_per_line=(sample.num_prompt_tokens or 0) / SAMPLE_LINES or TOKENS_PER_LINE,
            has_logprobs=bool(sample.tokens),
        )
        facts = replace(facts, lines=facts.lines_for(num_prompt_tokens))
        return await _with_cache_facts(server, facts, f"{nonce} cache")
    except ServerFaultError as error:
        raise ConfigError(f"the server does not answer completions: {error}") from error


async def _cards(server: Server) -> list[Card]:
    """What the server lists; nothing if it has no such list."""
    try:
        _, document = await server.call("GET", "/v1/models")
    except ServerFaultError as error:
        if error.status == 0:
            raise ConfigError(
                f"no server can be reached at {server.url}: {error}; start one, or name another URL"
            ) from error
        if error.status in (401, 403):
            raise ConfigError(f"{error}; give a key (--api-key-file)") from error
        return []
    data = document.get("data") if isinstance(document, dict) else None
    return [_card(one) for one in data or () if isinstance(one, dict) and one.get("id")]


def _card(one: JsonObject) -> Card:
    length, meta = one.get("max_model_len"), one.get("meta")
    if not isinstance(length, int) and isinstance(meta, dict):
        length = meta.get("n_ctx")  # llama.cpp's
    return Card(
        id=str(one["id"]),
        parent=str(one.get("parent") or ""),
        root=str(one.get("root") or ""),
        max_model_len=length if isinstance(length, int) else 0,
    )


def _base(cards: list[Card], model: str) -> Card:
    bases = [card for card in cards if not card.parent]
    if model:
        return next((c for c in cards if c.id == model), Card(model, "", "", 0))
    if not bases:
        raise ConfigError("the server lists no model at /v1/models; name one with --model")
    return bases[0]


async def _extras(server: Server, model: str, nonce: str) -> tuple[JsonObject, Answer]:
    """The extras that the server takes, and a short answer. A refused field is left out."""
    plain: JsonObject = {
        "model": model,
        "prompt": long_prompt(SAMPLE_LINES, nonce),
        "max_tokens": 2,
        "temperature": 0,
    }
    taken: JsonObject = dict(EXTRAS)
    while True:
        try:
            return taken, await server.complete({**plain, **taken})
        except ServerFaultError as error:
            if error.status not in (400, 422, 500) or not taken:
                raise
            named = [name for name in taken if name in str(error)]
            taken.pop(named[0] if named else next(reversed(taken)))


async def _with_cache_facts(server: Server, facts: Facts, first_line: str) -> Facts:
    """What a second and a third request with one prompt tell of the cache."""
    body = {
        "model": facts.model,
        "prompt": long_prompt(facts.lines, first_line),
        "max_tokens": 2,
        "temperature": 0,
        **facts.extras,
    }
    await server.complete(body)
    again = await server.complete(body)
    tells, hits = again.num_cached_tokens is not None, bool(again.num_cached_tokens)
    knows_salts = await _refuses(server, {**body, "cache_salt": 5})
    # The reset comes after: a cache that it has emptied would pass for one that salts part.
    way = ColdWay.NONE
    if tells and not hits:
        way = ColdWay.NO_CACHE
    elif knows_salts and not await _cached(server, {**body, "cache_salt": "another"}):
        way = ColdWay.SALT
    elif hits and not await _cached(server, {**body, "cache_prompt": False}):
        way = ColdWay.CACHE_PROMPT
    reset_route = await _reset_route(server)
    if way is ColdWay.NONE and reset_route and not await _cached(server, body):
        way = ColdWay.RESET
    return replace(
        facts,
        tells_cached=tells,
        has_hits=hits,
        knows_salts=knows_salts,
        reset_route=reset_route,
        cold_way=way,
    )


async def _refuses(server: Server, body: JsonObject) -> bool:
    """Whether a field of a wrong type is refused, and so is known."""
    try:
        await server.complete(body)
    except ServerFaultError as error:
        return error.status in (400, 422)
    return False


async def _cached(server: Server, body: JsonObject) -> bool:
    """Whether any token of it came from the cache; or the server refuses it."""
    try:
        return bool((await server.complete(body)).num_cached_tokens)
    except ServerFaultError:
        return True


async def _reset_route(server: Server) -> str:
    for route in RESET_ROUTES:
        if await server.status_of("POST", route, {}) == 200:
            return route
    return ""
