"""Makes traces from seeds: the worst that clients and operators do, close together.

Prompts share beginnings, versions come back, pools are small. Knows the model by its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_fields
from random import Random
from typing import Literal

from msgspec.structs import replace

from lora_serve.fuzz.crowds import CrowdWriter
from lora_serve.fuzz.flags import SHARED_TIERS, drawn_flags
from lora_serve.fuzz.prompts import PromptWriter
from lora_serve.fuzz.sampling import ParamsWriter
from lora_serve.fuzz.talks import TalkWriter
from lora_serve.fuzz.trace import (
    Abort,
    AdapterCall,
    Ask,
    ConcurrentCalls,
    Damage,
    Embeds,
    Event,
    Kill,
    Load,
    PauseAndResume,
    Prompt,
    Reset,
    Trace,
    Unload,
)
from lora_serve.pooling import PoolingParams, SequencePoolingType
from lora_serve.sampling_params import PROMPT_ONLY

NAMES = ("red", "green", "blue", "grey")
PLACES = ("", "one", "other")
SALTS = ("", "", "", "salt", "pepper")
OTHER_KEY_SHARE = 0.2  # of the requests
CONCURRENT_CALLS_SHARE = 0.05  # of a trace's events
PAUSES_SHARE = 0.02  # of a trace's events
ABORTS_SHARE = 0.03  # of a trace's events
EMBEDDINGS_SHARE = 0.15  # of the requests
TOKEN_EMBEDDINGS_SHARE = 0.3  # of these
KV_TRANSFERS_SHARE = 0.2  # of the requests, where other servers could find KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a trace may use. vocab_size: ids below it are all known to the model.

    marks_reasoning: by one token each, so that it may have a budget. fixed_flags: the server runs
    already, so that traces cannot choose how it is set up. num_ranks: among how many its model can
    be divided on this machine, one apart. in_segments: of how many ranks, one among them, sums may
    be in segments. all_reduced: of how many, none of them one, a sum may be that of each rank's
    part. model_impls: what can run the model beside what runs it by default.
    quantizations: what its weights can become while they are loaded.
    num_versions_for_all: so many versions, the first, can be loaded whatever runs it; None: all.
    """

    vocab_size: int
    num_versions: int
    num_requests: int = 100
    concurrency: int = 16
    faults: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    has_chat: bool = True
    marks_reasoning: bool = False
    has_embeds: bool = True
    fixed_flags: bool = False
    num_ranks: tuple[int, ...] = ()
    in_segments: tuple[int, ...] = ()
    all_reduced: tuple[int, ...] = ()
    model_impls: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    num_versions_for_all: int | None = None


def make_trace(seed: int, scope: Scope) -> Trace:
    rng = Random(seed)
    pooling_type: SequencePoolingType = Random(f"pooling type {seed}").choice(("LAST", "MEAN"))
    tiers = () if scope.fixed_flags else _tiers(rng, scope)
    flags: tuple[str, ...] = ()
    if not scope.fixed_flags:
        ranks = (scope.num_ranks, scope.in_segments, scope.all_reduced)
        can_be = (*ranks, scope.model_impls, scope.quantizations)
        flags = drawn_flags(seed, rng, tiers, pooling_type, *can_be)
    if "--model-impl" in flags and scope.num_versions_for_all is not None:
        scope = with_fields(scope, num_versions=scope.num_versions_for_all)
    return Trace(
        seed=seed,
        flags=flags,
        tiers=tiers,
        concurrency=rng.choice((max(1, scope.concurrency // 2), scope.concurrency)),
        events=tuple(_Writer(rng, scope, tiers, seed, pooling_type).events()),
    )


def _tiers(rng: Random, scope: Scope) -> tuple[str, ...]:
    return tuple(tier for tier in scope.tiers if rng.random() < 0.5)


class _Writer:
    """Writes one trace's events."""

    def __init__(
        self,
        rng: Random,
        scope: Scope,
        tiers: tuple[str, ...],
        seed: int,
        pooling_type: SequencePoolingType,
    ) -> None:
        """What was added later has generators of its own, so that seeds keep their requests."""
        self._rng = rng
        self._calls_rng = Random(f"concurrent calls {seed}")
        self._pause_rng = Random(f"pauses {seed}")
        self._abort_rng = Random(f"aborts {seed}")
        self._pooling_rng = Random(f"pooling {seed}")
        self._token_pooling_rng = Random(f"pooling of tokens {seed}")
        self._talks = TalkWriter(seed, scope.marks_reasoning)
        self._key_rng = Random(f"API keys {seed}")
        self._transfer_rng = Random(f"KV transfers {seed}")
        self._is_shared = not SHARED_TIERS.isdisjoint(tiers)
        self._pooling_type = pooling_type
        self._scope = scope
        self._damages = "tier" in scope.faults and "disk" in tiers
        self._kill_at = -1
        if "kill" in scope.faults and rng.random() < 0.4:
            self._kill_at = rng.randrange(scope.num_requests // 4, scope.num_requests)
        vocab_size, has_chat, has_embeds = scope.vocab_size, scope.has_chat, scope.has_embeds
        self._prompts = PromptWriter(
            rng, vocab_size, seed, has_chat=has_chat, has_embeds=has_embeds
        )
        self._params = ParamsWriter(rng, vocab_size, seed)
        self._crowds = CrowdWriter(seed, vocab_size)
        self._named: set[str] = set()

    def events(self) -> list[Event]:
        events: list[Event] = [self._load(name) for name in NAMES[:2]]
        num_asked = 0
        while num_asked < self._scope.num_requests:
            if num_asked == self._kill_at:
                events.append(Kill(wait_ms=self._rng.randrange(30)))
                self._kill_at = -1
            if self._calls_rng.random() < CONCURRENT_CALLS_SHARE:
                events.append(self._concurrent_calls())
            if self._pause_rng.random() < PAUSES_SHARE:
                events.append(self._pause())
            if self._abort_rng.random() < ABORTS_SHARE:
                events.append(self._abort())
            if not self._scope.fixed_flags:  # with one key, and places enough
                events += self._crowds.draw(sorted(self._named))
            event = self._event()
            num_asked += isinstance(event, Ask)
            events.append(event)
        return events

    def _event(self) -> Event:
        rng = self._rng
        choice = rng.random()
        if choice < 0.08:
            return self._load(rng.choice(NAMES))
        if choice < 0.1 and len(self._named) > 1:
            name = rng.choice(sorted(self._named))
            self._named.discard(name)
            return Unload(lora_name=name, wait_ms=self._wait_ms())
        if choice < 0.115:
            chosen = rng.choice((None, *sorted(self._named)))
            return Reset(lora_name=chosen, wait_ms=self._wait_ms())
        if choice < 0.125 and self._damages:
            return Damage(seed=rng.randrange(2**31))
        return self._ask()

    def _pause(self) -> PauseAndResume:
        rng = self._pause_rng
        mode: Literal["keep", "wait"] = rng.choice(("keep", "keep", "wait"))
        return PauseAndResume(
            mode=mode, pause_ms=rng.choice((0, 5, 50, 200)), wait_ms=rng.choice((0, 5))
        )

    def _abort(self) -> Abort:
        """End some requests, or all, where they are the trace's own."""
        rng = self._abort_rng
        newest = rng.choice((1, 2, 8, None))
        if newest is None and self._scope.fixed_flags:
            newest = 4
        return Abort(newest=newest, wait_ms=rng.choice((0, 5, 20)))

    def _concurrent_calls(self) -> ConcurrentCalls:
        """Calls that get in each other's way: mostly all of one name."""
        rng = self._calls_rng
        names = rng.choices(sorted(self._named), k=rng.choice((1, 1, 2)))
        calls = [self._call_of(rng.choice(names)) for _ in range(rng.choice((2, 2, 3)))]
        return ConcurrentCalls(calls=tuple(calls), wait_ms=rng.choice((0, 0, 1, 20)))

    def _call_of(self, name: str) -> AdapterCall:
        rng = self._calls_rng
        choice = rng.random()
        if choice < 0.55:
            version = rng.randrange(self._scope.num_versions)
            return Load(lora_name=name, version=version, in_place=rng.random() < 0.8)
        if choice < 0.75:
            return Unload(lora_name=name)
        return Reset(lora_name=name if choice < 0.92 else None)

    def _wait_ms(self) -> int:
        """The wait before an event: mostly none, now and then until answers have ended."""
        return self._rng.choice((0, 0, 0, 1, 5, 20, 60))

    def _load(self, name: str) -> Load:
        self._named.add(name)
        return Load(
            lora_name=name,
            version=self._rng.randrange(self._scope.num_versions),
            place=self._rng.choice(PLACES),
            wait_ms=self._wait_ms(),
        )

    def _ask(self) -> Ask:
        rng = self._rng
        prompt = self._prompts.draw()
        params = self._params.draw(prompt)
        is_streamed = rng.random() < 0.5 and params.prompt_logprobs is None
        leaves_early = is_streamed and rng.random() < 0.25
        leaves_anyhow = rng.random() < 0.07
        ask = Ask(
            prompt=prompt,
            params=params,
            lora_name=rng.choice((None, *sorted(self._named))),
            api_key=self._api_key(),
            cache_salt=rng.choice(SALTS),
            priority=rng.randrange(3),
            is_streamed=is_streamed,
            leaves_after_tokens=rng.randrange(12) if leaves_early else None,
            leaves_after_ms=rng.choice((1, 5, 20, 100)) if leaves_anyhow else None,
            wait_ms=self._wait_ms(),
            kv_transfer=self._kv_transfer(),
        )
        if self._wants_embedding(prompt):
            return self._embedding(ask)
        return self._talks.draw(ask) if self._scope.has_chat else ask

    def _kv_transfer(self) -> Literal["", "do_remote_decode", "do_remote_prefill"]:
        """What is asked of KV that other servers may find, in every fifth request."""
        rng = self._transfer_rng
        if not self._is_shared or rng.random() >= KV_TRANSFERS_SHARE:
            return ""
        return rng.choice(("do_remote_decode", "do_remote_prefill"))

    def _api_key(self) -> int:
        is_other = self._key_rng.random() < OTHER_KEY_SHARE
        return int(is_other and not self._scope.fixed_flags)

    def _wants_embedding(self, prompt: Prompt) -> bool:
        is_drawn = self._pooling_rng.random() < EMBEDDINGS_SHARE
        return is_drawn and not self._scope.fixed_flags and not isinstance(prompt, Embeds)

    def _embedding(self, ask: Ask) -> Ask:
        """The same request for an embedding of its prompt."""
        rng = self._pooling_rng
        is_of_tokens = self._token_pooling_rng.random() < TOKEN_EMBEDDINGS_SHARE
        pooling = PoolingParams(
            pooling_type="ALL" if is_of_tokens else self._pooling_type,
            normalize=rng.random() < 0.5,
            dimensions=rng.choice((None, None, 8)),
        )
        return replace(
            ask, params=PROMPT_ONLY, pooling=pooling, is_streamed=False, leaves_after_tokens=None
        )
