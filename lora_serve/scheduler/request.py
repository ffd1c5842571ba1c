"""One request's state, from its arrival to its last token.

The scheduler and its parts write it, each fields of its own, but for two things. The blocks
(block_tables, num_committed_blocks) are KVCacheManager's to write; the times are EngineCore's,
since the scheduler reads no clock: scheduled_time when it first runs, first_token_time when it has
a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from lora_serve.bitmask import allows, with_token
from lora_serve.identity import Activation, BlockHash, BlockHasher, CacheNamespace, NoAdapter
from lora_serve.kv.block_table import BlockTable
from lora_serve.pooling import PoolingParams, sums_added
from lora_serve.prompts import EmbeddedPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.bad_words import BadWords
from lora_serve.scheduler.drafted import DraftedRequest
from lora_serve.scheduler.seen import TokenCounts
from lora_serve.scheduler.thinking import Thinking
from lora_serve.structured_outputs import MaskedDrafts

SortKey = tuple[int, int]  # (priority, order of arrival): smaller goes first


class RequestStatus(Enum):
    """Where a request is.

    AWAITING_MASK: until its grammar is compiled, or has said what may come next. WAITING: in the
    queue. DEFERRED: until another wrote its next block. FETCHING: until the tiers have given the KV
    they may have, or have not. HELD: it has not begun, and a pause waits for those that have.
    """

    AWAITING_MASK = "awaiting mask"
    WAITING = "waiting"
    DEFERRED = "deferred"
    FETCHING = "fetching"
    HELD = "held"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its answer so far.

    token_ids: prompt, then output; 0 where a prompt embedding stands.
    num_computed_tokens: tokens whose KV finished steps have written, or found.
    num_scheduled_tokens: these, and those that steps in flight compute, drafts included.
    num_computed_in_all: tokens that finished steps have computed for it, those that it lost when it
        was preempted among them.
    num_pending_tokens: drawn by steps in flight, and not known yet. A step that verifies drafts
        counts as one, since nothing is scheduled behind it.
    step_index: its place in the last step that it had a part in.
    awaits_drafts: a step in flight gives it drafts, which its next one verifies.
    num_cached_tokens: found when it was first admitted, of num_queried_tokens looked up.
    num_cached_by_tier: the same by where they were found, "device" first; empty without tiers.
    gave_way: it was preempted for a share that had nothing running, so it does not resume first;
        until it runs again.
    num_found_blocks: blocks that were found at the last admission, and need not be computed.
    block_hashes: of all full blocks; the chain of `identity.py`.
    adapter_start: as of `ScheduledRequest`.
    share: at whose cost it is served, where shares are fair.
    tenant, do_remote_decode: as of `GenerateRequest`.
    drafted: what drafts the tokens that follow; None where nothing does.
    counts: what penalties ask; None without any.
    allowed: what the client allows, as SampleInput.bitmask has it; None for all.
    grammar_start: the first place in token_ids that the grammar holds; None while the model
        reasons.
    next_mask: what the grammar and the client allow next; None while that is not known, or without
        a grammar. While the model reasons it says only that the grammar is there.
    masked_drafts: tokens that the grammar forces next, or permits of a guess; None without any.
    bad_words: None without any. thinking: None where reasoning may be of any length.
    end_token_ids: all that end the answer, and are not drawn before min_tokens.
    is_plain: what may be drawn, and how likely, hangs on no token drawn before and on no place.
    pooling: how an embedding is made of the prompt, which is all that it asks for then; else None.
    hidden_sums: of its computed tokens, as of `RequestStepOutput`; b"" where no mean is asked for.
    hidden_rows: hidden states of its computed tokens, as far as they are asked for.
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
    prompt_embeds: EmbeddedPrompt | None = None
    embeds_digests: tuple[bytes, ...] = ()
    adapter_start: int = 0
    share: str = ""
    tenant: str = ""
    do_remote_decode: bool = False
    pooling: PoolingParams | None = None
    hidden_sums: bytes = b""
    hidden_rows: bytes = b""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_computed_in_all: int = 0
    num_scheduled_tokens: int = 0
    num_pending_tokens: int = 0
    step_index: int = 0
    awaits_drafts: bool = False
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
    allowed: bytes | None = None
    grammar_start: int | None = field(init=False)
    next_mask: bytes | None = None
    masked_drafts: MaskedDrafts | None = None
    bad_words: BadWords | None = None
    thinking: Thinking | None = None
    end_token_ids: array[int] = field(init=False)
    is_plain: bool = field(init=False)
    drafted: DraftedRequest | None = None

    def __post_init__(self) -> None:
        reasoning = self.params.reasoning
        is_open = reasoning is not None and reasoning.is_open
        self.grammar_start = None if is_open else self.num_prompt_tokens
        if self.params.thinking_token_budget is not None:
            assert reasoning is not None, f"{self.request_id}: nothing marks its reasoning"
            self.thinking = Thinking(reasoning, self.params.thinking_token_budget)
        self.end_token_ids = array("q", (*self.eos_token_ids, *self.params.stop_token_ids))
        if self.params.has_penalties:  # an embedding row is no token and is never penalised
            self.counts = TokenCounts(self._prompt_tokens())
        self.is_plain = self._is_plain()
        self._hash_full_blocks()

    @property
    def has_begun(self) -> bool:
        """Whether it runs, or ran before it was preempted."""
        return self.status is RequestStatus.RUNNING or self.num_preemptions > 0

    @property
    def may_give_way(self) -> bool:
        """Whether it has got far enough to begin again for another share's sake.

        At most twice as many tokens as it has now were computed for it, and it may have to compute
        all once more. So giving way never costs more than three times the tokens that it ends with.
        """
        return self.num_computed_in_all <= 2 * self.num_computed_tokens

    def _prompt_tokens(self) -> list[int]:
        """The prompt's tokens, without those that stand for rows."""
        tokens = self.token_ids
        if self.prompt_embeds is None:
            return tokens
        kept, end = list[int](), 0
        for position, count, _ in self.prompt_embeds.runs:
            kept += tokens[end:position]
            end = position + count
        return kept + tokens[end:]

    @property
    def lora_name(self) -> str | NoAdapter:
        return self.namespace.lora_name

    def namespace_of(self, block: int) -> CacheNamespace:
        """Whose KV a block of its chain is: the base model's until its adapter begins to act."""
        is_own = block >= self.adapter_start // self.block_size
        return self.namespace if is_own else self.namespace.of_base_model

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
        number, or drafts are behind it or are being made, or the grammar, bad words or the
        reasoning's budget have to know it first.
        """
        if self.awaits_drafts or not (self.is_plain or self._knows_its_rules):
            return 0
        num_known = len(self.token_ids) - self.num_scheduled_tokens
        if num_known > 0 or not self.num_pending_tokens:
            return num_known
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        is_last = num_output_tokens + self.num_pending_tokens >= self.max_tokens
        return 0 if is_last or num_known < 0 else 1

    @property
    def _knows_its_rules(self) -> bool:
        """Whether no pending token, nor a mask to come, is needed to tell what may be drawn."""
        if self.has_grammar and (self.next_mask is None or self.num_pending_tokens):
            return False
        if self.num_pending_tokens and self.bad_words is not None and self.bad_words.has_sequences:
            return False
        return self.thinking is None or not self.thinking.hangs_on(self.num_pending_tokens)

    @property
    def has_grammar(self) -> bool:
        return self.params.structured_outputs is not None

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says what may come next; it does not while the model reasons."""
        return self.has_grammar and self.grammar_start is not None

    def _is_plain(self) -> bool:
        return not (
            self.has_grammar
            or self.params.has_penalties
            or self.params.min_tokens
            or self.allowed is not None
            or self.bad_words is not None
            or self.thinking is not None
        )

    @property
    def bitmask(self) -> bytes | None:
        """What may be sampled next, as `SampleInput.bitmask` has it; a grammar's mask is known.

        Where reasoning must end its marker comes, whatever else excludes it.
        """
        if self.thinking is not None and self.thinking.must_end:
            return self.thinking.only_end
        if not self.has_grammar or self.grammar_start is None:
            return self.allowed
        reasoning, mask = self.params.reasoning, self.next_mask
        if reasoning is None or reasoning.is_open or self.num_output_tokens or mask is None:
            return mask
        if self.allowed is not None and not allows(self.allowed, reasoning.start):
            return mask
        return with_token(mask, reasoning.start)

    def constrained_token_ids(self, num_new: int) -> tuple[int, ...]:
        """The newest tokens, as far as the grammar constrains them."""
        if self.grammar_start is None:
            return ()
        return tuple(self.token_ids[max(self.grammar_start, self.num_tokens - num_new) :])

    def banned_token_ids(self, position: int, drafts: Sequence[int] = ()) -> Sequence[int]:
        """What may not be drawn at a position, besides what a mask says. drafts: those before."""
        if self.thinking is not None and self.thinking.must_end:
            return ()
        is_short = position - self.num_prompt_tokens < self.params.min_tokens
        ends: Sequence[int] = self.end_token_ids if is_short else ()
        if self.bad_words is None:
            return ends
        start = max(self.num_prompt_tokens, self.num_tokens + 1 - self.bad_words.longest)
        banned = self.bad_words.banned_after((*self.token_ids[start:], *drafts))
        return (*ends, *banned) if ends else banned

    @property
    def num_sharable_blocks(self) -> int:
        """Full blocks that may be found."""
        return self.num_findable_tokens // self.block_size

    @property
    def num_findable_tokens(self) -> int:
        """Tokens whose KV may be found: those behind them are computed, to score or to sample.

        0 where the hidden states of all tokens are asked for, or their mean: no cache has them.
        """
        if self.pooling is not None:
            return 0 if self.pooling.needs_all_rows else self.num_tokens - 1
        scored = self.next_scored_position
        return self.num_tokens - 1 if scored is None else scored

    @property
    def next_scored_position(self) -> int | None:
        """The prompt position that gives the next prompt logprob, of the token behind it.

        None where no prompt logprob is asked for, or all were reported.
        """
        params = self.params
        if params.prompt_logprobs is None:
            return None
        position = params.prompt_logprob_start + self.num_prompt_logprobs
        return position if position < self.num_prompt_tokens - 1 else None

    def start_over(self) -> None:
        """Compute all tokens again, those drawn so far among them."""
        self.num_preemptions += 1
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.hidden_sums = self.hidden_rows = b""
        self.offers_blocks = True

    def add_hidden_sums(self, sums: bytes) -> None:
        self.hidden_sums = sums_added(self.hidden_sums, sums) if self.hidden_sums else sums

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if not self.is_plain:
            self._note_for_rules(token_id)
        if len(self.token_ids) % self.block_size == 0:
            self._hash_full_blocks()

    def _note_for_rules(self, token_id: int) -> None:
        if self.has_grammar:
            self._note_for_grammar(token_id)
        if self.counts is not None:
            self.counts.drew(token_id)
        if self.thinking is not None:
            self.thinking.drew(token_id)

    def _note_for_grammar(self, token_id: int) -> None:
        """See reasoning begin and end."""
        reasoning = self.params.reasoning
        if reasoning is not None and self.grammar_start is None:
            if token_id == reasoning.end:
                self.grammar_start = self.num_tokens
            return
        is_first = self.num_output_tokens == 1
        if reasoning is not None and is_first and token_id == reasoning.start:
            self.grammar_start = None  # one that is open has none before its end
        else:
            self.next_mask = self.masked_drafts = None

    def _hash_full_blocks(self) -> None:
        size = self.block_size
        first, end = len(self.block_hashes), len(self.token_ids) // size
        if first == end:
            return
        parent = self.block_hashes[-1] if first else self.hasher.root(self._root_namespace)
        for index in range(first, end):
            tokens = self.token_ids[index * size : (index + 1) * size]
            activation = self._activation(index)
            parent = self.hasher.extend(parent, tokens, self._embeds_digest(index), activation)
            self.block_hashes.append(parent)

    @property
    def _root_namespace(self) -> CacheNamespace:
        return self.namespace.of_base_model if self.adapter_start else self.namespace

    def _activation(self, block_index: int) -> Activation | None:
        start = self.adapter_start
        if not start or block_index != start // self.block_size:
            return None
        return Activation(self.namespace, start)

    def _embeds_digest(self, block_index: int) -> bytes:
        if block_index >= len(self.embeds_digests):
            return b""
        return self.embeds_digests[block_index]
