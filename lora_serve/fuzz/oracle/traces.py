"""Random lives of an engine, each from a seed, checked against the oracle's lone answers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_serve.fuzz.oracle.crowds import CrowdRequest, RandomCrowds
from lora_serve.fuzz.oracle.drafts import Asked, Repeats, drawn_row_costs, drawn_speculation
from lora_serve.fuzz.oracle.draws import RequestDraws
from lora_serve.fuzz.oracle.engine import BLOCK_SIZE, OracleEngine
from lora_serve.fuzz.oracle.executor import MakeExecutor, OracleExecutor
from lora_serve.fuzz.oracle.expected import Expected, TraceResult
from lora_serve.fuzz.oracle.grammars import OracleGrammars
from lora_serve.fuzz.oracle.indexer import OracleIndexer
from lora_serve.fuzz.oracle.loader import (
    BUCKET,
    HUB,
    OracleLoader,
    ReadFaults,
    invocation_of,
)
from lora_serve.fuzz.oracle.lone_answers import (
    lone_answer,
    lone_pooled,
    lone_prompt_logprobs,
)
from lora_serve.fuzz.oracle.pauses import RandomPauses
from lora_serve.identity import (
    BASE_MODEL,
    EVERYTHING,
    BlockHasher,
    Everything,
    NoAdapter,
)
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv_groups import KVGroup
from lora_serve.messages import (
    NO_RULES,
    AbortRequests,
    ErrorInfo,
    ResetPrefixCache,
    TokenRules,
    UnloadAdapter,
)
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

NAMES = ("red", "green", "blue", "grey")
FULL, NARROW, WIDE = KVGroup(), KVGroup(20), KVGroup(50)
GROUPS = (
    *((FULL,),) * 3,
    (NARROW,),
    (WIDE,),
    (FULL, NARROW),
    (NARROW, FULL, WIDE, NARROW),
)
LATEST = 8  # requests, most of which have not ended yet


@dataclass
class PendingLoad:
    """A call that was not answered yet. contents: all that its path has held since."""

    name: str
    path: str
    contents: set[str]


def pool_blocks(num_blocks: int, groups: Sequence[KVGroup]) -> int:
    """The pool that is as tight for groups with a window, which hold half the blocks at most."""
    return sum(num_blocks if group.window is None else num_blocks // 2 for group in groups)


class OracleTrace:
    """One engine and the random operations on it."""

    draws_class = RequestDraws

    def __init__(
        self,
        seed: int,
        kv_class: type[KVCacheManager] = KVCacheManager,
        hasher_class: type[BlockHasher] = BlockHasher,
        executor_class: MakeExecutor = OracleExecutor,
        async_scheduling: bool = False,
        groups: tuple[KVGroup, ...] | None = None,
        grammars_class: type[OracleGrammars] = OracleGrammars,
        loader_class: type[OracleLoader] = OracleLoader,
        recorder_class: type[KVEventRecorder] | None = None,
    ) -> None:
        """groups: of the model's layers; drawn if left out. recorder_class: of events, if any."""
        self.rng = rng = random.Random(seed)
        self.other_rng = random.Random(f"shares {seed}")
        self.grammar_rng = random.Random(f"grammars {seed}")
        self.read_rng = random.Random(f"reads {seed}")
        self.settings = {
            **self._drawn_settings(groups or random.Random(f"groups {seed}").choice(GROUPS)),
            "loader_class": loader_class,
            "kv_class": kv_class,
            "hasher_class": hasher_class,
            "executor_class": executor_class,
            "async_scheduling": async_scheduling,
            "grammars_class": grammars_class,
            "speculative": drawn_speculation(random.Random(f"speculation {seed}")),
            "row_costs": drawn_row_costs(random.Random(f"row costs {seed}")),
        }
        if recorder_class is not None:
            self.settings |= self._event_settings(recorder_class, random.Random(f"events {seed}"))
        self.engine = self._new_engine()
        self.draws = self.draws_class(seed, rng, self.grammar_rng)
        self.expected: dict[str, Expected] = {}
        self.versions: dict[str, str] = {}  # name -> content, as far as calls were answered
        self.pending: dict[int, PendingLoad] = {}
        self.result = TraceResult()
        self.repeats = Repeats(random.Random(f"repeats {seed}"), self.settings["speculative"])
        self.pauses = RandomPauses(random.Random(f"pauses {seed}"))
        self.crowds = RandomCrowds(random.Random(f"crowds {seed}"), self.settings["max_num_seqs"])

    @property
    def num_events(self) -> int:
        """The KV events that the indexer has read, of all kinds."""
        indexer: OracleIndexer | None = self.settings.get("indexer")
        return 0 if indexer is None else indexer.num_events.total()

    def run(self, num_operations: int = 60) -> TraceResult:
        for name in NAMES[:2]:
            self._load(name, inplace=False)
        self._settle_loads()
        for _ in range(num_operations):
            for request_id in self.pauses.operate(self.engine):
                self.expected[request_id].is_aborted = True
            for asked in self.crowds.operate(self._names_without_invocation):
                self._add_of_crowd(asked)
            self._operate()
        self.pauses.resume(self.engine)
        self.engine.run()
        self._settle_loads()
        self._judge()
        return self.result

    def _drawn_settings(self, groups: tuple[KVGroup, ...]) -> dict[str, Any]:
        rng = self.rng
        max_loras = rng.choice((1, 2, 3))
        return {
            "num_blocks": pool_blocks(rng.choice((14, 24, 60)), groups),
            "max_num_seqs": rng.choice((2, 4, 8)),
            "max_num_batched_tokens": rng.choice((7, 40, 200)),
            "max_loras": max_loras,
            "max_cpu_loras": rng.choice((max_loras, 3, 8)),
            "policy": rng.choice(("fcfs", "priority")),
            "fair_share": self.other_rng.choice(("none", "none", "adapter", "key")),
            "load_delay": rng.choice((0, 3)),
            "read_faults": self.read_rng.choice((None, None, ReadFaults(0.1, 0.3))),
            "read_rng": self.read_rng,
            "groups": groups,
            "max_mask_delay": self.grammar_rng.choice((0, 3, 12)),
        }

    def _event_settings(
        self, recorder_class: type[KVEventRecorder], rng: random.Random
    ) -> dict[str, Any]:
        return {
            "indexer": OracleIndexer(BLOCK_SIZE),
            "recorder_class": recorder_class,
            "event_rng": rng,
            "loses_events": rng.choice((0, 0, 0.1)),
        }

    def _new_engine(self) -> OracleEngine:
        return OracleEngine(**self.settings)

    def _operate(self) -> None:
        choice = self.rng.random()
        if choice < 0.5:
            self._add()
        elif choice < 0.55:
            self._abort()
        elif choice < 0.61:
            self._load(self.rng.choice(NAMES), inplace=True)
        elif choice < 0.63:
            self._replace_at_once()
        elif choice < 0.65:
            self._unload()
        elif choice < 0.66:
            self._reset()
        else:
            for _ in range(self.rng.randrange(1, 6)):
                self.engine.step()
                self._settle_loads()

    def _namespace(self) -> tuple[str | NoAdapter, str]:
        """Draw an adapter's name, or BASE_MODEL, and a salt."""
        names: list[str | NoAdapter] = [BASE_MODEL, *self.versions]
        return self.rng.choice(names), self.rng.choice(("", "", "salt"))

    def _add(self, namespace: tuple[str | NoAdapter, str] | None = None) -> None:
        rng, request_id = self.rng, f"r{len(self.expected)}"
        name, salt = namespace or self._namespace()
        tenant = self.other_rng.choice(("", "x", "y"))
        repeated = None if namespace else self.repeats.take([BASE_MODEL, *self.versions])
        if repeated is not None:
            name, salt, tenant = repeated.name, repeated.salt, repeated.tenant
        digest = b"" if name is BASE_MODEL else _digest(self.versions[name])
        invocation = () if name is BASE_MODEL else invocation_of(self.versions[name])
        prompt, rows = self.draws.prompt_or_rows(invocation, repeated)
        max_tokens = rng.randrange(1, 60)
        num_groups = len(self.settings["groups"])
        pooling = self.draws.pooling()
        if pooling is None:
            constraint = self.draws.constraint(repeated)
            ask = (prompt, digest, max_tokens, rows, num_groups, constraint)
            params, rules, expected = self._expected(*ask, invocation)
        else:
            params, rules = SamplingParams(max_tokens=0, seed=1), NO_RULES
            pooled = lone_pooled(prompt, digest, pooling, rows, num_groups, invocation)
            expected = Expected([], digest, pooled=pooled)
        if repeated is None and not rows:
            self.repeats.note(Asked(name, salt, tenant, prompt, params.structured_outputs))
        self.expected[request_id] = expected
        self.engine.add(
            request_id,
            prompt,
            lora_name=name,
            params=params,
            salt=salt,
            priority=rng.randrange(3),
            tenant=tenant,
            embeds_rows=rows,
            pooling=pooling,
            rules=rules,
            do_remote_decode=self._is_handed_over(),
        )

    @property
    def _names_without_invocation(self) -> list[str | NoAdapter]:
        always = [name for name, content in self.versions.items() if not invocation_of(content)]
        return [BASE_MODEL, *always]

    def _add_of_crowd(self, asked: CrowdRequest) -> None:
        request_id = f"r{len(self.expected)}"
        digest = b"" if asked.name is BASE_MODEL else _digest(self.versions[asked.name])
        num_groups = len(self.settings["groups"])
        answer = lone_answer(asked.prompt, digest, asked.max_tokens, num_groups=num_groups)
        self.expected[request_id] = Expected(answer, digest)
        self.engine.add(
            request_id,
            asked.prompt,
            lora_name=asked.name,
            max_tokens=asked.max_tokens,
            tenant=asked.tenant,
        )

    def _expected(
        self,
        prompt: Sequence[int],
        digest: bytes,
        max_tokens: int,
        rows: Sequence[bytes],
        num_groups: int,
        constraint: StructuredOutput | None,
        invocation: Sequence[int],
    ) -> tuple[SamplingParams, TokenRules, Expected]:
        """Draw what else is asked of an answer, and compute the one that it must get."""
        ask = (prompt, digest, max_tokens, rows, num_groups, constraint)
        scored_start = None if rows else self.draws.scored_start(len(prompt))
        lone = partial(lone_answer, *ask, invocation=invocation)
        budget, reasoning = self.draws.budget(), None
        if constraint is not None or budget is not None:
            reasoning = self.draws.reasoning(*ask, invocation)
        budget = None if reasoning is None else budget
        answer = lone(reasoning=reasoning, budget=budget)
        rules = self.draws.rules(answer)
        if rules is not NO_RULES:
            answer = lone(rules=rules, reasoning=reasoning, budget=budget)
        expected = Expected(answer, digest)
        expected.may_fail = constraint is not None and rules is not NO_RULES
        if scored_start is not None:
            asked = (prompt, digest, scored_start, num_groups, invocation)
            expected.prompt_logprobs = lone_prompt_logprobs(*asked)
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=1,
            prompt_logprobs=None if scored_start is None else 0,
            prompt_logprob_start=scored_start or 0,
            structured_outputs=constraint,
            reasoning=reasoning,
            thinking_token_budget=budget,
        )
        return params, rules, expected

    def _is_handed_over(self) -> bool:
        """Whether another engine is to go on with the prompt; there is none here."""
        return False

    def _abort(self) -> None:
        if self.expected:
            self._leave(self.rng.choice(list(self.expected)[-LATEST:]))

    def _replace_at_once(self) -> None:
        """Abort a name's requests and give it new weights, while a step may still use the old."""
        if self.versions:
            name = self.rng.choice(list(self.versions))
            digest = _digest(self.versions[name])
            self._load(name, inplace=True)
            self._leave(*(one for one, its in self.expected.items() if its.digest == digest))

    def _leave(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.expected[request_id].is_aborted = True
        self.engine.core.handle(AbortRequests(request_ids))

    def _load(self, name: str, inplace: bool) -> None:
        content = f"{name}-{self.rng.randrange(3)}"  # few contents, so that traces roll back
        path = self.rng.choice((f"/{name}", f"/{name}/other"))
        draw = self.read_rng.random()
        path = f"{HUB if draw < 0.1 else BUCKET}{name}" if draw < 0.2 else path
        for pending in self.pending.values():
            if pending.path == path:
                pending.contents.add(content)
        call_id = self.engine.load(name, path, content, inplace)
        self.pending[call_id] = PendingLoad(name, path, {content})

    def _settle_loads(self) -> None:
        unanswered = set()
        for call_id, pending in list(self.pending.items()):
            reply = self.engine.calls.get(call_id)
            if reply is None:
                unanswered.add(pending.name)
                continue
            del self.pending[call_id]
            if reply.error is not None:
                assert self._is_excused(reply.error), reply.error
                continue
            assert pending.name not in unanswered, "an earlier call for this name is yet to come"
            digest = bytes.fromhex(reply.adapters[0].digest)
            read = [content for content in pending.contents if _digest(content) == digest]
            assert read, "it was published with other bytes than its path has held since"
            self.versions[pending.name] = read[0]

    def _unload(self) -> None:
        if len(self.versions) > 1 and not self.pending:
            name = self.rng.choice(list(self.versions))
            del self.versions[name]
            self.engine.core.handle(UnloadAdapter(10**6 + len(self.expected), name))

    def _reset(self) -> None:
        scopes: list[str | Everything] = [EVERYTHING, *self.versions]
        self.engine.core.handle(ResetPrefixCache(10**7, self.rng.choice(scopes)))

    def _judge(self) -> None:
        """Compare all answers, once no request is left."""
        engine, result = self.engine, self.result
        self._judge_answers()
        result.num_preemptions += engine.core.scheduler.totals.num_preemptions
        result.num_evictions += engine.core.adapters.num_evictions
        result.num_timeouts += engine.loader.num_timeouts
        result.num_late_reads += engine.loader.num_late
        result.num_pauses = self.pauses.num_pauses
        result.num_given_way += engine.places.num_given_way
        assert engine.kv.usage == 0.0, "blocks are still held after the last request has ended"
        infos = engine.core.adapters.infos()
        assert not any(info.num_leases for info in infos)
        stood_for = {name: _digest(content).hex() for name, content in self.versions.items()}
        assert {info.name: info.digest for info in infos} == stood_for, "a name stands for another"

    def _is_excused(self, error: ErrorInfo) -> bool:
        """Whether a refusal was right: a version's files are gone, or reading them hangs."""
        self.result.num_lost += 1
        if error.kind == "AdapterUnavailableError":
            return self.settings["read_faults"] is not None
        return error.kind == "AdapterChangedError"

    def _judge_answers(self) -> None:
        engine, result = self.engine, self.result
        for request_id, expected in self.expected.items():
            outputs = engine.outputs.get(request_id, [])
            error = outputs[-1].error if outputs else None
            if error is not None and not (
                expected.may_fail and error.kind == "InvalidRequestError"
            ):
                assert self._is_excused(error), error
                continue
            if not expected.is_met_by(outputs):
                result.wrong.append(request_id)
            result.num_hit_tokens += outputs[-1].num_cached_tokens if outputs else 0
        result.num_requests += len(self.expected)


def _digest(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()
