"""Makes traces from seeds: the worst that clients and operators do, close together.

Prompts share beginnings, versions come back, pools are small. Knows the model by its vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as with_fields
from random import Random
from typing import Literal

from msgspec.structs import replace

from lora_serve.demo.corpus import LABEL_REQUESTS, sentence
from lora_serve.fuzz.flags import SHARED_TIERS, drawn_flags
from lora_serve.fuzz.grammars import CONSTRAINTS, TAGS
from lora_serve.fuzz.talks import TalkWriter
from lora_serve.fuzz.trace import (
    Abort,
    AdapterCall,
    Ask,
    Chat,
    ConcurrentCalls,
    Damage,
    Embeds,
    Event,
    Kill,
    Load,
    PauseAndResume,
    Prompt,
    Reset,
    Text,
    Tokens,
    Trace,
    Unload,
)
from lora_serve.fuzz.versions import INVOCATION
from lora_serve.pooling import PoolingParams, SequencePoolingType
from lora_serve.sampling_params import PROMPT_ONLY, SamplingParams
from lora_serve.structured_outputs import StructuredOutput

NAMES = ("red", "green", "blue", "grey")
PLACES = ("", "one", "other")
SALTS = ("", "", "", "salt", "pepper")
OTHER_KEY_SHARE = 0.2  # of the requests
STOPS = (("e",), (" the", "\n"), ("er", "A", "zz"))
BAD_WORDS = (("e",), ("the keeper", "letter", "a"), ("er", "of the", "once more"))
PREFIX_LENGTHS = (60, 120, 200)
ANSWER_LENGTHS = (1, 2, 12, 48, 96, 96)
CONCURRENT_CALLS_SHARE = 0.05  # of a trace's events
PAUSES_SHARE = 0.02  # of a trace's events
ABORTS_SHARE = 0.03  # of a trace's events
TAGS_SHARE = 0.25  # of the requests with a grammar
EMBEDDINGS_SHARE = 0.15  # of the requests
TOKEN_EMBEDDINGS_SHARE = 0.3  # of these
INVOKED_SHARE = 0.5  # of the prompts of tokens
KV_TRANSFERS_SHARE = 0.2  # of the requests, where other servers could find KV
RESERVED_TOKENS = 3  # the first ids are often special


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a trace may use. vocab_size: ids below it are all known to the model.

    marks_reasoning: by one token each, so that it may have a budget. fixed_flags: the server runs
    already, so that traces cannot choose how it is set up. num_ranks: among how many its model can
    be divided on this machine, one apart. in_segments: of how many ranks, one among them, sums may
    be in segments. model_impls: what can run the model beside what runs it by default.
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
    model_impls: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    num_versions_for_all: int | None = None


def make_trace(seed: int, scope: Scope) -> Trace:
    rng = Random(seed)
    pooling_type: SequencePoolingType = Random(f"pooling type {seed}").choice(("LAST", "MEAN"))
    tiers = () if scope.fixed_flags else _tiers(rng, scope)
    flags: tuple[str, ...] = ()
    if not scope.fixed_flags:
        can_be = (scope.num_ranks, scope.in_segments, scope.model_impls, scope.quantizations)
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
        """Answers are held to a grammar in half of the traces, and calls are sent at once.

        These, and later sampling parameters, are drawn from generators of their own, so that a
        seed's requests stay what they were.
        """
        self._rng = rng
        self._grammar_rng = Random(f"grammars {seed}")
        self._calls_rng = Random(f"concurrent calls {seed}")
        self._pause_rng = Random(f"pauses {seed}")
        self._abort_rng = Random(f"aborts {seed}")
        self._tag_rng = Random(f"structural tags {seed}")
        self._sampling_rng = Random(f"sampling {seed}")
        self._pooling_rng = Random(f"pooling {seed}")
        self._token_pooling_rng = Random(f"pooling of tokens {seed}")
        self._talks = TalkWriter(seed, scope.marks_reasoning)
        self._invocation_rng = Random(f"invocations {seed}")
        self._key_rng = Random(f"API keys {seed}")
        self._transfer_rng = Random(f"KV transfers {seed}")
        self._is_shared = not SHARED_TIERS.isdisjoint(tiers)
        self._pooling_type = pooling_type
        self._constrained_share = self._grammar_rng.choice((0.0, 0.3))
        self._scope = scope
        self._damages = "tier" in scope.faults and "disk" in tiers
        self._kill_at = -1
        if "kill" in scope.faults and rng.random() < 0.4:
            self._kill_at = rng.randrange(scope.num_requests // 4, scope.num_requests)
        self._prefixes = [self._token_ids(rng.choice(PREFIX_LENGTHS)) for _ in range(3)]
        self._row_seeds = [rng.randrange(2**31) for _ in range(3)]
        self._named: set[str] = set()
        kinds: list[Callable[[], Prompt]] = [self._tokens, self._tokens, self._text]
        kinds += [self._chat] * scope.has_chat + [self._embeds] * scope.has_embeds
        self._kinds = kinds

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
        prompt = rng.choice(self._kinds)()
        params = self._params(prompt)
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

    # ── prompts ─────────────────────────────────────────────────────────────────────────────

    def _token_ids(self, count: int) -> tuple[int, ...]:
        ids = range(RESERVED_TOKENS, self._scope.vocab_size)
        return tuple(self._rng.choice(ids) for _ in range(count))

    def _tokens(self) -> Prompt:
        rng = self._rng
        if rng.random() < 0.3:
            return Tokens((*self._prefixes[0], *INVOCATION))  # the very same, again and again
        prefix = rng.choice(self._prefixes)
        kept = rng.choice((len(prefix), rng.randrange(len(prefix) + 1)))
        invocation = INVOCATION if self._invocation_rng.random() < INVOKED_SHARE else ()
        return Tokens((*prefix[:kept], *invocation, *self._token_ids(rng.randint(1, 8))))

    def _text(self) -> Prompt:
        shared = "The keeper reads every letter once more. " * self._rng.randrange(3)
        return Text(shared + sentence(self._rng) + " " + self._rng.choice(LABEL_REQUESTS))

    def _chat(self) -> Prompt:
        messages = [
            (role, text)
            for _ in range(self._rng.randrange(2))
            for role, text in (("user", LABEL_REQUESTS[0]), ("assistant", sentence(self._rng)))
        ]
        return Chat((*messages, ("user", self._rng.choice(LABEL_REQUESTS))))

    def _embeds(self) -> Prompt:
        shared = (self._rng.choice(self._row_seeds), self._rng.randrange(1, 150))
        return Embeds((shared, (self._rng.randrange(2**31), self._rng.randint(1, 5))))

    # ── settings ────────────────────────────────────────────────────────────────────────────

    def _params(self, prompt: Prompt) -> SamplingParams:
        rng = self._rng
        is_greedy = rng.random() < 0.5
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2, 4)),
            max_tokens=rng.choice(ANSWER_LENGTHS),
            temperature=0.0 if is_greedy else rng.choice((0.5, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.7)),
            repetition_penalty=1.0 if isinstance(prompt, Embeds) else rng.choice((1.0, 1.0, 1.2)),
            seed=rng.randrange(2**31),
            stop=rng.choice(STOPS) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice((None, 0, 2, 5)),
            logit_bias={self._token_ids(1)[0]: 3.0} if rng.random() < 0.1 else {},
            structured_outputs=self._constraint(),
        )
        return replace(params, **self._prompt_logprobs(prompt), **self._token_rules(params))

    def _constraint(self) -> StructuredOutput | None:
        rng = self._grammar_rng
        if rng.random() >= self._constrained_share:
            return None
        constraint = rng.choice(CONSTRAINTS)
        is_tag = self._tag_rng.random() < TAGS_SHARE
        return self._tag_rng.choice(TAGS) if is_tag else constraint

    def _token_rules(self, params: SamplingParams) -> dict[str, object]:
        """Which tokens may be drawn, and are told; a grammar and these may leave none in common."""
        rng, rules = self._sampling_rng, dict[str, object]()
        if params.structured_outputs is None and rng.random() < 0.1:
            ids = range(RESERVED_TOKENS, self._scope.vocab_size)
            rules["allowed_token_ids"] = tuple(rng.sample(ids, 2 * len(ids) // 3))
        if params.structured_outputs is None and rng.random() < 0.15:
            rules["bad_words"] = rng.choice(BAD_WORDS)
        if rng.random() < 0.1:
            ids = range(self._scope.vocab_size)
            rules |= {"logprob_token_ids": tuple(rng.sample(ids, 4)), "logprobs": 4}
        return rules

    def _prompt_logprobs(self, prompt: Prompt) -> dict[str, int]:
        """Ask for those of the whole prompt, or of its end, before which blocks may be found."""
        is_chosen = self._rng.random() < 0.1
        if isinstance(prompt, Embeds):
            return {}
        rng = self._sampling_rng
        part = rng.choice(({}, {"prompt_logprobs_last_n": rng.randrange(80)}))
        if isinstance(prompt, Tokens) and rng.random() < 0.3:
            part = {"prompt_logprob_start": rng.randrange(len(prompt.token_ids))}
        # More often than a whole one, which computes every prompt anew.
        return {"prompt_logprobs": 1, **part} if is_chosen or rng.random() < 0.1 else {}
