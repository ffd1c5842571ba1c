"""What crosses between the API process and the engine process: frozen, plain, msgpack.

Requests to the engine are `EngineMessage`s, answers are `EngineReply`s; msgspec tags the types.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lora_serve.engine_stats import EngineStats, RequestTimes
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything, NoAdapter
from lora_serve.model_info import DraftModelInfo
from lora_serve.step import TokenLogprobs

PauseMode = Literal["abort", "wait", "keep"]


class Choice(msgspec.Struct, frozen=True):
    """One of the n continuations of a prompt, which the engine knows as a request of its own."""

    request_id: str
    seed: int


class TokenRules(msgspec.Struct, frozen=True):
    """Which tokens the client lets be drawn, whatever a grammar allows.

    allowed: as SampleInput.bitmask has them; None for all.
    bad_words: token ids, of each word at least one: the last must not follow the others.
    """

    allowed: bytes | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RULES = TokenRules()


class EngineRequest(msgspec.Struct, frozen=True, tag=True):
    """A request that was checked. Its choices are taken in together, so one version answers all.

    request: with max_tokens and seed resolved, so that a request sent again, to another engine
        process even, draws the same tokens. What its params allow and forbid is in `rules` alone.
    eos_token_ids: end tokens, unless params.ignore_eos.
    embeds_digests: of an embeddings prompt, `identity.embeds_digest` of rows
        [i * block_size, (i + 1) * block_size), the last one over what is left.
    """

    request: GenerateRequest
    eos_token_ids: tuple[int, ...] = ()
    embeds_digests: tuple[bytes, ...] = ()
    arrival_time: float = 0.0
    rules: TokenRules = NO_RULES

    @property
    def choices(self) -> list[Choice]:
        """Choice i draws with seed + i. A choice that is the only one has the request's id."""
        name, params = self.request.request_id, self.request.params
        assert params.seed is not None, f"{name}: seed was not resolved"
        if params.n == 1:
            return [Choice(name, params.seed)]
        return [Choice(f"{name}-{i}", params.seed + i) for i in range(params.n)]

    @property
    def choice_ids(self) -> list[str]:
        return [choice.request_id for choice in self.choices]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Forget requests whose callers are gone."""

    request_ids: tuple[str, ...]


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    """End requests whose callers wait: each is told of it by the finish_reason "abort"."""

    call_id: int
    request_ids: tuple[str, ...]


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Make no more steps, and let requests that come wait. Answered when no step is made.

    mode: what becomes of the requests that are here. "abort" ends them, as EndRequests does. "wait"
        lets those end that have begun. "keep" lets all stand where they are, with their KV.
    """

    call_id: int
    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter, and let the name stand for it unless it is only to be examined.

    digest: which it must have, in hexadecimal; any if empty. generation: which the name must at
    least have from then on.
    """

    call_id: int
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False
    digest: str = ""
    generation: int = 0
    is_examined: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    lora_name: str


class ListAdapters(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget EVERYTHING that is cached, or the KV of one adapter (raises its generation).

    generation: which the adapter must at least have from then on.
    """

    call_id: int
    lora_name: str | Everything = EVERYTHING
    generation: int = 0


class AdapterInfo(msgspec.Struct, frozen=True):
    """A registered adapter as `/v1/models` shows it. residency: "resident" or "evicted".

    base_model: what its config says it was trained on; "" if it says nothing.
    invocation_tokens: as of `AdapterCheckpoint`.
    """

    name: str
    path: str
    digest: str
    generation: int
    rank: int
    num_bytes: int
    residency: str
    pinned: bool
    num_leases: int
    created: float
    base_model: str = ""
    invocation_tokens: tuple[int, ...] = ()

    @property
    def is_resident(self) -> bool:
        return self.residency == "resident"


class RestoreAdapters(msgspec.Struct, frozen=True, tag=True):
    """Let names stand again for the versions that an engine before this one had.

    Nothing is read: they are as evicted, so each is read, and its digest verified, when it is next
    needed. generations: what each name's KV must at least have to be trusted.
    """

    adapters: tuple[AdapterInfo, ...]
    generations: dict[str, int]


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class GetRequests(msgspec.Struct, frozen=True, tag=True):
    """Ask how far these requests have come; of one that is not here, nothing is told."""

    call_id: int
    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


AdminCall = ListAdapters | LoadAdapter | UnloadAdapter | ResetPrefixCache | Pause | Resume
EngineMessage = (
    EngineRequest
    | AbortRequests
    | EndRequests
    | AdminCall
    | RestoreAdapters
    | GetStats
    | GetRequests
    | Shutdown
)


class ErrorInfo(msgspec.Struct, frozen=True):
    """A LoraServeError on its way to the API process: class by name, message, attributes.

    attributes: what `vars` gives, as JSON.
    """

    kind: str
    message: str
    attributes: bytes = b"{}"


class EngineOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The output of one step for one request. The last one has `finish_reason` or `error`.

    finish_reason: "stop", "length" or "abort". stop_token_id: which token ended it, if one did.
    num_cached_tokens: prompt tokens whose KV was found, not computed; set in the first output.
    num_cached_by_tier: the same by where they were found, "device" first; empty without tiers.
    adapter: the version that answers. prompt_logprobs: per prompt token asked for, in order.
    pooled: of a request with `pooling`, what `pooling.embedding` takes; in its last output.
    scheduled_time: when it first had a part in a step, on the monotonic clock.
    num_stored_tokens: of the prompt, those that other servers find; None where that is not asked.
    num_accepted_drafts, num_rejected_drafts: that the step verified.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_cached_by_tier: dict[str, int] = {}
    adapter: AdapterRef | NoAdapter = BASE_MODEL
    scheduled_time: float = 0.0
    num_stored_tokens: int | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    error: ErrorInfo | None = None

    @property
    def num_drafts(self) -> int:
        """The drafts that the step verified."""
        return self.num_accepted_drafts + self.num_rejected_drafts


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """One step's outputs for all requests, and finished requests' times.

    step_num_tokens: prompt tokens that were computed, and tokens that were generated.
    """

    outputs: tuple[EngineOutput, ...]
    finished: tuple[RequestTimes, ...] = ()
    step_num_tokens: int = 0


class RequestStanding(msgspec.Struct, frozen=True):
    """How far a request has come.

    is_running: it has a part in the steps; else it waits, for whatever. num_computed_tokens: of its
        prompt and its answer; those that were found in a cache, num_cached_tokens, count, too.
    """

    request_id: str
    is_running: bool
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class CallReply(msgspec.Struct, frozen=True, tag=True):
    """Answer to the message with this call_id: an error, or what that message asks for.

    paths: where the adapters lie that a name or a request has, for ListAdapters.
    adapters: those that ListAdapters asks for; the one that LoadAdapter published; the one whose
        generation ResetPrefixCache raised, as it stood then, also if a tier has not forgotten.
    """

    call_id: int
    error: ErrorInfo | None = None
    adapters: tuple[AdapterInfo, ...] = ()
    paths: tuple[str, ...] = ()
    stats: EngineStats | None = None
    requests: tuple[RequestStanding, ...] = ()


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine process: its model, or why it could not start.

    max_request_tokens: of a prompt with its answer, as far as the KV cache holds them.
    num_longest_requests: how many as long as that fit at once. kv_bytes: of the KV cache.
    draft_model: None without any.
    """

    fingerprint: bytes = b""
    dtype: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    max_model_len: int = 0
    num_blocks: int = 0
    kernels: str = ""
    max_request_tokens: int = 0
    num_longest_requests: int = 0
    kv_bytes: int = 0
    architecture: str = ""
    device: str = ""
    num_threads: int = 0
    num_parameters: int = 0
    weights: str = ""
    draft_model: DraftModelInfo | None = None
    error: ErrorInfo | None = None


class RanksLate(msgspec.Struct, frozen=True, tag=True):
    """The ranks that all others wait for, before EngineReady; none where that is not known."""

    ranks: tuple[int, ...]


class EngineEnds(msgspec.Struct, frozen=True, tag=True):
    """Why a ready engine ends now, where it knows; the last that it says."""

    reason: str


EngineReply = StepOutputs | CallReply | RanksLate | EngineReady | EngineEnds
