"""A server with adapters and a prefix cache whose "model" is a hash; each `Bug` is one it can have.

The KV of a block is a hash of all that shaped it: the weights, the block's tokens, the block before
it. An answer is a hash of the KV and the weights. So whatever was found in the cache wrongly, or
was computed with other weights, shows in the next token. Tokens are words.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from tests.fakes.http_server import Call

BLOCK = 16
NUM_BLOCKS = 200  # in the cache; those that were used last stay
BASE = "base"
WORDS = tuple(f"w{number}" for number in range(500))
UNWRITTEN = b"nobody wrote this"
# Of a prefill; of a token that is streamed, while others merely take turns; of a load.
PREFILL_SECONDS, TOKEN_SECONDS, LOAD_SECONDS = 0.004, 0.0004, 0.001


class Bug(Enum):
    """What the server does wrong."""

    NONE = auto()
    ANSWERS_VARY = auto()
    CACHED_PROMPTS_ROUND_OTHERWISE = auto()
    HITS_ARE_A_BLOCK_TOO_LONG = auto()
    NO_LOGPROBS_OF_CACHED_TOKENS = auto()
    CACHED_TOKENS_ARE_NOT_ECHOED = auto()
    CACHED_REQUESTS_PASS_OVER_STOP = auto()
    KEY_IGNORES_THE_ADAPTER = auto()
    BASE_HAS_THE_KEY_OF_THE_LAST_ADAPTER = auto()
    KEY_IGNORES_SALTS = auto()
    KEY_HOLDS_PLACEHOLDERS_OF_EMBEDS = auto()
    KEY_HOLDS_THE_NAME = auto()
    KEY_HOLDS_NAME_AND_PATH = auto()
    OLD_FILES_ARE_NOT_READ = auto()
    WEIGHTS_ARE_FOUND_BY_NAME = auto()
    UNLOADED_REQUESTS_GO_ON_AS_BASE = auto()
    UNKNOWN_NAMES_ARE_THE_BASE = auto()
    BLOCKS_OF_ABORTED_REQUESTS_ARE_OFFERED = auto()
    BLOCKS_ARE_OFFERED_WHEN_SCHEDULED = auto()
    SEEDS_SET_ONE_GENERATOR = auto()
    ONE_ADAPTER_IS_ACTIVE = auto()
    EVICTED_BLOCKS_KEEP_THEIR_KEY = auto()
    CONCURRENT_LOADS_FAIL = auto()
    BROKEN_LOADS_GIVE_500 = auto()
    BROKEN_LOADS_DROP_WHAT_WAS_THERE = auto()


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Weights:
    """One version of an adapter, or the base model."""

    name: str
    path: str
    content: bytes
    mtime: float = 0.0


@dataclass
class Running:
    """One request's KV, and what it found."""

    weights: Weights
    units: list[object]
    kv: bytes = b""
    num_cached: int = 0


@dataclass
class CachedServer:
    """root: told as the model's directory. The switches take away what a server may lack."""

    root: str
    bug: Bug = Bug.NONE
    has_loads: bool = True
    has_salts: bool = True
    has_reset: bool = True
    tells_cached: bool = True
    has_cache: bool = True
    noise: float = 0.0  # of logprobs, by how requests are batched
    dies: bool = False  # and says nothing any more
    breaks: bool = False  # and says 500 to all
    adapters: dict[str, Weights] = field(default_factory=dict)
    resets: int = 0
    _cache: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    _slots: dict[bytes, int] = field(default_factory=dict)
    _memory: list[bytes] = field(default_factory=list)
    _base: Weights = Weights(BASE, "", b"base")
    _active: Weights | None = None
    _last_root: bytes = b""
    _rng: Random = field(default_factory=Random)
    _num_answered: int = 0
    _num_loading: int = 0
    _running: int = 0

    async def __call__(self, call: Call) -> None:
        routes = {
            "/v1/completions": self._complete,
            "/v1/models": self._models,
        }
        if self.has_loads:
            routes |= {
                "/v1/load_lora_adapter": self._load,
                "/v1/unload_lora_adapter": self._unload,
            }
        if self.has_reset:
            routes["/reset_prefix_cache"] = self._reset
        handler = routes.get(call.path)
        if self.dies:
            await asyncio.sleep(60)
        elif self.breaks:
            await _refuse(call, 500, "the engine is dead")
        elif handler is None:
            await _refuse(call, 404, "no such route")
        else:
            await handler(call)

    # ── adapters ────────────────────────────────────────────────────────────────────────────

    async def _models(self, call: Call) -> None:
        cards: list[dict[str, Any]] = [{"id": BASE, "root": self.root, "max_model_len": 4096}]
        cards += [{"id": name, "parent": BASE, "root": one.path}
                  for name, one in self.adapters.items()]  # fmt: skip
        await call.reply({"object": "list", "data": cards})

    async def _load(self, call: Call) -> None:
        body = call.body
        if not isinstance(body.get("lora_name"), str) or not body.get("lora_path"):
            return await _refuse(call, 400, "lora_name and lora_path are wanted")
        name, old = body["lora_name"], self.adapters.get(body["lora_name"])
        if old and not body.get("load_inplace"):
            return await _refuse(call, 400, f"{name} is loaded already")
        if self.bug is Bug.CONCURRENT_LOADS_FAIL and self._num_loading:
            return await _refuse(call, 500, "KeyError")
        self._num_loading += 1
        try:
            await asyncio.sleep(LOAD_SECONDS)
            new = self._read(name, Path(body["lora_path"]))
        except (OSError, SafetensorError) as error:
            if self.bug is Bug.BROKEN_LOADS_DROP_WHAT_WAS_THERE:
                self.adapters.pop(name, None)
            status = 500 if self.bug is Bug.BROKEN_LOADS_GIVE_500 else 400
            return await _refuse(call, status, str(error))
        finally:
            self._num_loading -= 1
        if self.bug is Bug.OLD_FILES_ARE_NOT_READ and old and new.mtime < old.mtime:
            new = old
        self.adapters[name] = new
        return await call.reply({"said": "loaded"})

    def _read(self, name: str, path: Path) -> Weights:
        file = path / "adapter_model.safetensors"
        load_file(file)
        return Weights(name, str(path), digest(file.read_bytes()), file.stat().st_mtime)

    async def _unload(self, call: Call) -> None:
        if self.adapters.pop(call.body["lora_name"], None) is None:
            return await _refuse(call, 404, "no such adapter")
        return await call.reply({"said": "unloaded"})

    async def _reset(self, call: Call) -> None:
        self.resets += 1
        self._cache.clear()
        self._slots.clear()
        await call.reply({"success": True})

    # ── the cache ───────────────────────────────────────────────────────────────────────────

    def _root_key(self, weights: Weights, salt: str) -> bytes:
        bug = self.bug
        salt = "" if bug is Bug.KEY_IGNORES_SALTS else salt
        if bug is Bug.KEY_IGNORES_THE_ADAPTER:
            return digest(salt)
        if bug is Bug.KEY_HOLDS_THE_NAME:
            return digest(weights.name, salt)
        if bug is Bug.KEY_HOLDS_NAME_AND_PATH:
            return digest(weights.name, weights.path, salt)
        if bug is Bug.BASE_HAS_THE_KEY_OF_THE_LAST_ADAPTER:
            if weights is self._base and self._last_root:
                return digest(self._last_root, salt)
            self._last_root = weights.content
            return digest(weights.content, salt)
        return digest(weights.name, weights.content, salt)

    def _find(self, key: bytes) -> bytes | None:
        if self.bug is Bug.EVICTED_BLOCKS_KEEP_THEIR_KEY:
            slot = self._slots.get(key)
            return None if slot is None else self._memory[slot]
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
        return found

    def _offer(self, key: bytes, kv: bytes) -> None:
        if self.bug is Bug.EVICTED_BLOCKS_KEEP_THEIR_KEY:
            if key not in self._slots:
                self._slots[key] = len(self._slots) % NUM_BLOCKS
            slot = self._slots[key]
            self._memory += [b""] * (slot + 1 - len(self._memory))
            self._memory[slot] = kv
            return
        self._cache[key] = kv
        while len(self._cache) > NUM_BLOCKS:
            self._cache.popitem(last=False)

    async def _prefill(self, running: Running, salt: str, *, may_hit: bool) -> None:
        """Find what is cached, compute the rest, and offer it to others afterwards."""
        units, weights, bug = running.units, running.weights, self.bug
        is_embeds = bug is Bug.KEY_HOLDS_PLACEHOLDERS_OF_EMBEDS
        key, new, is_hit = self._root_key(weights, salt), [], may_hit and self.has_cache
        for start in range(0, len(units) - 1, BLOCK):
            block = units[start : start + BLOCK]
            if len(block) < BLOCK or start + BLOCK > len(units) - 1:
                break
            named = ["?" if is_embeds and isinstance(unit, float) else unit for unit in block]
            key = digest(key, named)
            found = self._find(key) if is_hit else None
            if found is None:
                is_too_long = is_hit and running.num_cached and bug is Bug.HITS_ARE_A_BLOCK_TOO_LONG
                is_hit = False
                if is_too_long:
                    continue
                running.kv = digest(running.kv, block, weights.content)
                new.append((key, running.kv))
            else:
                running.kv, running.num_cached = found, running.num_cached + BLOCK
        await self._compute(new)
        for key, kv in new:
            self._offer(key, kv)

    async def _compute(self, new: list[tuple[bytes, bytes]]) -> None:
        """What takes time, of blocks that are to be offered."""
        if self.bug is Bug.BLOCKS_ARE_OFFERED_WHEN_SCHEDULED:
            for key, _ in new:
                self._offer(key, UNWRITTEN)
        try:
            is_slow = self.bug is Bug.BLOCKS_OF_ABORTED_REQUESTS_ARE_OFFERED
            await asyncio.sleep(40 * PREFILL_SECONDS if is_slow else PREFILL_SECONDS)
        except asyncio.CancelledError:
            if self.bug is Bug.BLOCKS_OF_ABORTED_REQUESTS_ARE_OFFERED:
                for key, _ in new:
                    self._offer(key, UNWRITTEN)
            raise

    # ── answers ─────────────────────────────────────────────────────────────────────────────

    async def _complete(self, call: Call) -> None:
        body = call.body
        if self.has_salts and not isinstance(body.get("cache_salt", ""), str):
            return await _refuse(call, 400, "cache_salt must be a text")
        weights = self._base if body["model"] == BASE else self.adapters.get(body["model"])
        if weights is None and self.bug is Bug.UNKNOWN_NAMES_ARE_THE_BASE:
            weights = self._base
        if weights is None:
            return await _refuse(call, 404, f"no model {body['model']}")
        self._active = weights
        self._num_answered += 1
        running = Running(weights, _units(body))
        salt = str(body.get("cache_salt", "")) if self.has_salts else ""
        self._running += 1
        try:
            await self._prefill(running, salt, may_hit=body.get("prompt_logprobs") is None)
            await self._say(call, body, running)
        finally:
            self._running -= 1

    async def _say(self, call: Call, body: dict[str, Any], running: Running) -> None:
        """Tokens one by one, streamed or together."""
        rng = Random(body.get("seed", 0))
        if self.bug is Bug.SEEDS_SET_ONE_GENERATOR:
            self._rng.seed(body.get("seed", 0))
            rng = self._rng
        said: list[tuple[str, dict[str, float]]] = []
        reason = "length"
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(TOKEN_SECONDS if body.get("stream") else 0)
            said.append(self._next(body, running, said, rng))
            text = " ".join(word for word, _ in said)
            if body.get("stream"):
                word = said[-1][0] if len(said) == 1 else f" {said[-1][0]}"
                await call.event(json.dumps(_piece(said[-1:], word, None)))
            if self._stops(body, running, text):
                text, reason = text[: text.index(body["stop"][0])], "stop"
                break
        if body.get("stream"):
            await call.event(json.dumps(_piece([], "", reason)))
            return await call.event("[DONE]")
        return await call.reply(self._answer(body, running, said, text, reason))

    def _stops(self, body: dict[str, Any], running: Running, text: str) -> bool:
        passes_over = self.bug is Bug.CACHED_REQUESTS_PASS_OVER_STOP and running.num_cached
        return bool(body.get("stop")) and not passes_over and body["stop"][0] in text

    def _next(
        self,
        body: dict[str, Any],
        running: Running,
        said: list[tuple[str, dict[str, float]]],
        rng: Random,
    ) -> tuple[str, dict[str, float]]:
        """The next word, and the most likely ones with their logprobs, itself among them."""
        tail = [running.units[len(running.units) // BLOCK * BLOCK - BLOCK :], [w for w, _ in said]]
        state = digest(running.kv, tail, self._weights_now(running).content)
        more = 1e-3 if self._rounds_otherwise(running) else 0.0
        if self.noise and self._running > 1:
            more += self.noise
        ranks = Random(state).sample(range(len(WORDS)), 5)
        likely = {WORDS[rank]: -0.5 * place - rank / 997 - more for place, rank in enumerate(ranks)}
        words = list(likely)
        return (rng.choice(words) if body["temperature"] else words[0]), likely

    def _weights_now(self, running: Running) -> Weights:
        weights, bug = running.weights, self.bug
        if bug is Bug.ONE_ADAPTER_IS_ACTIVE and self._active is not None:
            return self._active
        if bug is Bug.WEIGHTS_ARE_FOUND_BY_NAME:
            return self.adapters.get(weights.name, weights)
        if bug is Bug.UNLOADED_REQUESTS_GO_ON_AS_BASE and weights.name not in self.adapters:
            return self._base
        return weights

    def _rounds_otherwise(self, running: Running) -> bool:
        if self.bug is Bug.ANSWERS_VARY:
            return self._num_answered % 3 == 0
        return self.bug is Bug.CACHED_PROMPTS_ROUND_OTHERWISE and running.num_cached > 0

    def _answer(
        self,
        body: dict[str, Any],
        running: Running,
        said: list[tuple[str, dict[str, float]]],
        text: str,
        reason: str,
    ) -> dict[str, Any]:
        bug, units, num_cached = self.bug, running.units, running.num_cached
        answer = _piece(said, text, reason)
        choice = answer["choices"][0]
        if body.get("echo"):
            shown = units[num_cached:] if bug is Bug.CACHED_TOKENS_ARE_NOT_ECHOED else units
            choice["text"] = " ".join(map(str, shown)) + f" {text}"
        if body.get("prompt_logprobs") is not None:
            rows = [{str(unit): {"logprob": -len(str(unit)) / 7}} for unit in units]
            if bug is Bug.NO_LOGPROBS_OF_CACHED_TOKENS and self._has_answered(units):
                rows[:BLOCK] = [None] * BLOCK  # type: ignore[list-item]
            choice["prompt_logprobs"] = rows
        usage: dict[str, Any] = {"prompt_tokens": len(units)}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        return {**answer, "usage": usage}

    def _has_answered(self, units: list[object]) -> bool:
        """Whether the first block is cached for the base model."""
        return digest(self._root_key(self._base, ""), units[:BLOCK]) in self._cache


def _units(body: dict[str, Any]) -> list[object]:
    """Words, or a number for each row of embeddings."""
    if "prompt_embeds" not in body:
        return list(body["prompt"].split())
    data = base64.b64decode(body["prompt_embeds"])
    rows = (data[start : start + 32] for start in range(0, len(data), 32))
    return [float(int.from_bytes(digest(row)[:6])) for row in rows]


def _piece(
    said: list[tuple[str, dict[str, float]]], text: str, reason: str | None
) -> dict[str, Any]:
    logprobs = {
        "tokens": [word for word, _ in said],
        "token_logprobs": [likely[word] for word, likely in said],
        "top_logprobs": [likely for _, likely in said],
    }
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return {"object": "text_completion", "choices": [choice]}


async def _refuse(call: Call, status: int, message: str) -> None:
    await call.reply({"error": {"message": message, "code": status}}, status)
