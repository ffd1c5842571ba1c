"""One request's state, from its arrival to its last token.

The scheduler and its parts write it, each fields of its own, but for two things. The blocks
(block_tables, num_committed_blocks) are KVCacheManager's to write; the times are EngineCore's,
since the scheduler reads no clock: scheduled_time when it first runs, first_token_time when it has
a token.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from lora_serve.identity import BASE_MODEL, BlockHash, BlockHasher, CacheNamespace, NoAdapter
from lora_serve.kv.block_table import BlockTable
from lora_serve.messages import Choice, EngineRequest
from lora_serve.prompts import EmbedsPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.seen import TokenCounts

SortKey = tuple[int, int]  # (priority, order of arrival): smaller goes first


class RequestStatus(Enum):
    """Where a request is.

    AWAITING_MASK: until its grammar is compiled, or has said what may come next. WAITING: in the
    queue. DEFERRED: until another wrote its next block. FETCHING: until the tiers have given the KV
    they may have, or have not.
    """

    AWAITING_MASK = "awaiting mask"
    WAITING = "waiting"
    DEFERRED = "deferred"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its answer so far. block_hashes: the chain of `identity.py`.

    token_ids: prompt, then output; 0 where a prompt embedding stands.
    num_computed_tokens: tokens whose KV finished steps have written, or found.
    num_planned_tokens: these, and those that steps in flight compute, drafts included.
    num_pending_tokens: drawn by steps in flight, and not known yet. A step that verifies drafts
        counts as one, since nothing is planned behind it.
    step_index: its place in the last step that it had a part in.
    num_cached_tokens: of these, found when first admitted, out of num_queried_tokens looked up.
    num_cached_by_tier: the same by where they were found, "device" first; empty without tiers.
    gave_way: it was preempted for a share that had nothing running, so it does not resume first.
    num_found_blocks: blocks that had not to be computed after the last admission.
    block_hashes: of all full blocks.
    share: at whose cost it is served, where shares are fair.
    counts: what penalties ask; None without any.
    next_mask: what the grammar allows behind token_ids, as SampleInput.bitmask has it; None while
        that is not known, or without a grammar.
    end_token_ids: all that end the answer, and are not drawn before min_tokens.
    num_prompt_logprobs: how many have been reported. num_overtaken: later requests that got
        in before this one, which waits for its adapter's LoRA slot.
    """

    request_id: str
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    namespace: CacheNamespace
    hasher: BlockHasher
    block_size: int
    sort_key: SortKey
    token_ids: list[int]
    num_prompt_tokens: int
    arrival_time: float
    prompt_embeds: EmbedsPrompt | None = None
    embeds_digests: tuple[bytes, ...] = ()
    share: str = ""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_pending_tokens: int = 0
    step_index: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_cached_by_tier: dict[str, int] = field(default_factory=dict)
    num_found_blocks: int = 0
    num_preemptions: int = 0
    gave_way: bool = False
    num_prompt_logprobs: int = 0
    num_overtaken: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    block_tables: list[BlockTable] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    offers_blocks: bool = True
    counts: TokenCounts | None = None
    next_mask: bytes | None = None
    end_token_ids: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end_token_ids = array("q", (*self.eos_token_ids, *self.params.stop_token_ids))
        if self.params.has_penalties:  # an embedding row is no token and is never penalised
            self.counts = TokenCounts(self.token_ids if self.prompt_embeds is None else ())
        self._hash_full_blocks()

    @property
    def lora_name(self) -> str | NoAdapter:
        adapter = self.namespace.adapter
        return adapter if adapter is BASE_MODEL else adapter.name

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_ready_tokens(self) -> int:
        """How many tokens the next step may compute; 0 while that hangs on the step in flight.

        A pending token may be computed, for the worker has it: unless it will end the answer by its
        number, or drafts are behind it, or the grammar has to know it first.
        """
        if self.has_grammar and (self.next_mask is None or self.num_pending_tokens):
            return 0
        num_known = self.num_tokens - self.num_planned_tokens
        if num_known > 0 or not self.num_pending_tokens:
            return num_known
        is_last = self.num_output_tokens + self.num_pending_tokens >= self.max_tokens
        return 0 if is_last or num_known < 0 else 1

    @property
    def has_grammar(self) -> bool:
        return self.params.structured_outputs is not None

    @property
    def num_sharable_blocks(self) -> int:
        """Full blocks that may be found: the last token is computed, to sample from it."""
        return (self.num_tokens - 1) // self.block_size

    @property
    def needs_whole_prompt(self) -> bool:
        """Prompt logprobs need every prompt position computed, so they bypass the cache."""
        if self.params.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.next_mask = None
        if self.counts is not None:
            self.counts.drew(token_id)
        if len(self.token_ids) % self.block_size == 0:
            self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        size = self.block_size
        parent = self.block_hashes[-1] if self.block_hashes else self.hasher.root(self.namespace)
        for index in range(len(self.block_hashes), len(self.token_ids) // size):
            tokens = self.token_ids[index * size : (index + 1) * size]
            parent = self.hasher.extend(parent, tokens, self._embeds_digest(index))
            self.block_hashes.append(parent)

    def _embeds_digest(self, block_index: int) -> bytes:
        if block_index >= len(self.embeds_digests):
            return b""
        return self.embeds_digests[block_index]


def request_from_message(
    message: EngineRequest,
    choice: Choice,
    *,
    namespace: CacheNamespace,
    hasher: BlockHasher,
    block_size: int,
    sort_key: SortKey,
    share: str = "",
) -> Request:
    """Build one choice of what a message asks for; `engine/frontend/input.py` has checked it."""
    prompt, params = message.request.prompt, message.request.params
    embeds = prompt if isinstance(prompt, EmbedsPrompt) else None
    token_ids = list(prompt.token_ids) if embeds is None else [0] * embeds.num_tokens
    assert params.max_tokens is not None, f"{choice.request_id}: max_tokens was not resolved"
    return Request(
        request_id=choice.request_id,
        params=params,
        seed=choice.seed,
        max_tokens=params.max_tokens,
        eos_token_ids=message.eos_token_ids,
        namespace=namespace,
        hasher=hasher,
        block_size=block_size,
        sort_key=sort_key,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        arrival_time=message.arrival_time,
        prompt_embeds=embeds,
        embeds_digests=message.embeds_digests,
        share=share,
    )
