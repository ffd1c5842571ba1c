"""Requests, a router and replicas on one virtual clock.

A request leaves when its time has come and fewer than `max_concurrency` are running, as `bench`
sends them. The router chooses its replica at once; its way there and back is `frontend.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lora_serve.bench.workload import TimedRequest
from lora_serve.errors import ConfigError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL
from lora_serve.messages import (
    CallReply,
    EngineOutput,
    EngineReply,
    EngineRequest,
    LoadAdapter,
    RestoreAdapters,
    StepOutputs,
)
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.simulate.adapters import registered, version_of
from lora_serve.simulate.costs import Costs, EngineSettings
from lora_serve.simulate.events import EventQueue
from lora_serve.simulate.records import Simulated, SimulatedRequest, Totals
from lora_serve.simulate.replica import Replica
from lora_serve.simulate.rollout import RollOut, SimulatedCatalog
from lora_serve.simulate.routing import REPORT_SECONDS, SimulatedRouter


@dataclass(slots=True)
class _Running:
    """has_begun: the engine has told something of it."""

    record: SimulatedRequest
    has_begun: bool = False


@dataclass(eq=False)
class Fleet:
    """One simulation. `run` it once.

    max_concurrency: None is no limit. seed: of how single steps differ from their costs.
    """

    settings: EngineSettings
    costs: Costs
    num_replicas: int
    policy: str = "affinity"
    max_concurrency: int | None = None
    roll_outs: Sequence[RollOut] = ()
    seed: int = 0
    events: EventQueue = field(default_factory=EventQueue)

    def __post_init__(self) -> None:
        self.replicas = [self._replica(number) for number in range(self.num_replicas)]
        self._router = SimulatedRouter(self.policy, self.num_replicas)
        self._catalog = SimulatedCatalog(self.roll_outs, self.num_replicas, self.events, self._load)
        self.records: list[SimulatedRequest] = []
        self._running: dict[str, _Running] = {}
        self._known: list[set[str]] = [set() for _ in self.replicas]  # names, of each replica
        self._waiting: Iterator[TimedRequest] = iter(())
        self._next: TimedRequest | None = None
        self._is_planned = False  # whether the next request's time is an event that will come
        self._params: dict[int, SamplingParams] = {}  # by max_tokens

    def run(self, requests: Iterable[TimedRequest]) -> Simulated:
        """Answer all requests, which are in the order of their times.

        Raises:
            ConfigError: a request is longer than the model's --max-model-len, or than the KV cache.
        """
        self._waiting = iter(requests)
        self._next = next(self._waiting, None)
        self._plan_next()
        self.events.at(REPORT_SECONDS, self._report)
        self.events.run()
        lost = [record for record in self.records if not record.is_done]
        assert not lost, f"{len(lost)} requests were never answered"
        end = max((record.last_token for record in self.records), default=0.0)
        return Simulated(tuple(self.records), end, self._totals(), (*self._catalog.rolled_out,))

    # ── requests come ───────────────────────────────────────────────────────────────────────

    def _plan_next(self) -> None:
        if self._next is None or self._is_planned or self._is_full:
            return
        self._is_planned = True
        self.events.at(max(self.events.now, self._next.at_seconds), self._send_next)

    @property
    def _is_full(self) -> bool:
        return self.max_concurrency is not None and len(self._running) >= self.max_concurrency

    def _send_next(self) -> None:
        request = self._next
        assert request is not None, "a request's time came and there is none"
        self._is_planned = False
        self._next = next(self._waiting, None)
        self._send(request)
        self._plan_next()

    def _send(self, request: TimedRequest) -> None:
        self._check(request)
        replica = self._router.choose(request)
        record = SimulatedRequest.of(request, self.events.now, replica)
        request_id = str(len(self.records))
        self.records.append(record)
        self._running[request_id] = _Running(record)
        self.replicas[replica].frontend.send(
            len(request.prompt_token_ids),
            partial(self._note_sent, record),
            partial(self._arrive, request_id, request, replica),
        )

    def _note_sent(self, record: SimulatedRequest) -> None:
        record.sent = self.events.now

    def _arrive(self, request_id: str, request: TimedRequest, number: int) -> None:
        replica, name = self.replicas[number], request.adapter
        if name is not None:
            self._introduce(number, name)
            self._catalog.check_admitted(number, name)
        replica.send(
            EngineRequest(
                GenerateRequest(
                    request_id=request_id,
                    prompt=TokensPrompt(request.prompt_token_ids),
                    params=self._sampling(request.max_tokens),
                    lora_name=BASE_MODEL if name is None else name,
                ),
                arrival_time=self.events.now,
            )
        )

    def _introduce(self, number: int, name: str) -> None:
        """Tell a replica of a name, which costs nothing before it is asked for or replaced.

        Each replica knows all adapters, so this stands for what it was told at its start.
        """
        if name not in self._known[number]:
            self._known[number].add(name)
            self.replicas[number].send(RestoreAdapters((registered(name, 0),), {}))

    def _load(self, number: int, message: LoadAdapter) -> None:
        self._introduce(number, message.lora_name)
        self.replicas[number].send(message)

    def _report(self) -> None:
        """Let all replicas tell the router what they hold, as long as there are requests."""
        for number, replica in enumerate(self.replicas):
            on_device, in_memory = replica.adapters()
            self._router.report(number, on_device, in_memory)
        for name in self._catalog.take_replaced():
            self._router.replaced(name)
        if self._next is not None or self._running:
            self.events.at(self.events.now + REPORT_SECONDS, self._report)

    def _sampling(self, max_tokens: int) -> SamplingParams:
        params = self._params.get(max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True)
            self._params[max_tokens] = params
        return params

    def _check(self, request: TimedRequest) -> None:
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        settings = self.settings
        if num_tokens > settings.max_model_len:
            raise ConfigError(
                f"request {len(self.records)} has {len(request.prompt_token_ids)} prompt tokens "
                f"and max_tokens {request.max_tokens}, above --max-model-len "
                f"{settings.max_model_len}; a server refuses it"
            )
        longest = self.replicas[0].core.ready().max_request_tokens
        if num_tokens > longest:
            raise ConfigError(
                f"request {len(self.records)} needs the KV of {num_tokens} tokens, and "
                f"--num-gpu-blocks-override {settings.num_blocks} hold {longest}; give more blocks"
            )

    # ── answers come ────────────────────────────────────────────────────────────────────────

    def _replica(self, number: int) -> Replica:
        take_in = partial(self._take_in, number)
        seed = f"{self.seed} {number}"
        return Replica(self.settings, self.costs, self.events, take_in, seed)

    def _take_in(self, number: int, replies: Sequence[EngineReply]) -> None:
        frontend = self.replicas[number].frontend
        for reply in replies:
            if isinstance(reply, StepOutputs):
                frontend.take_message()
                for output in reply.outputs:
                    running = self._running[output.request_id]
                    is_first, running.has_begun = not running.has_begun, True
                    read = partial(self._take_output, running.record, output)
                    frontend.pass_on(len(output.new_token_ids), is_first, read)
            else:
                assert isinstance(reply, CallReply), reply
                self._catalog.ended(reply)

    def _take_output(self, record: SimulatedRequest, output: EngineOutput) -> None:
        now = self.events.now
        if output.new_token_ids:
            if not record.output_tokens:
                record.first_token = now
                record.cached_tokens = output.num_cached_tokens
                record.version = version_of(output.adapter)
            record.output_tokens += len(output.new_token_ids)
        if output.error is not None:
            record.error = output.error.message
            record.first_token = record.first_token or now
        if output.finish_reason is not None or output.error is not None:
            record.last_token = now
            record.is_done = True
            end = partial(self._end, output.request_id, record.replica)
            self.replicas[record.replica].frontend.end(end)

    def _end(self, request_id: str, replica: int) -> None:
        del self._running[request_id]
        self._router.ended(replica)
        self._plan_next()

    def _totals(self) -> Totals:
        stats = [replica.stats() for replica in self.replicas]
        return Totals(
            num_steps=sum(one.num_steps for one in stats),
            num_computed_tokens=sum(one.num_computed_tokens for one in stats),
            num_preemptions=sum(one.num_preemptions for one in stats),
            adapter_loads=sum(one.adapter_loads for one in stats),
            adapter_evictions=sum(one.adapter_evictions for one in stats),
            busy_seconds=tuple(replica.executor.busy_seconds for replica in self.replicas),
            num_events=self.events.num_events,
        )
