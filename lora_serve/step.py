"""One step as a value: all that a worker needs, and all that comes out.

Workers hold weights, KV and adapters, but no request: any step can be logged, replayed, tested.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.prompts import NO_ROWS, PlacedRows
from lora_serve.sampling_params import SamplingParams


class SeenTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a prompt and of its answer so far, each once.

    num_drawn: how often the answer has each; 0 for those of the prompt alone.
    """

    token_ids: array[int]
    num_drawn: array[int]

    def and_drawn(self, token_id: int) -> SeenTokens:
        """These tokens, once the answer has one more."""
        token_ids, num_drawn = self.token_ids[:], self.num_drawn[:]
        places = np.flatnonzero(np.asarray(self.token_ids) == token_id)
        if not len(places):
            token_ids.append(token_id)
            num_drawn.append(0)
        num_drawn[places[0] if len(places) else -1] += 1
        return SeenTokens(token_ids, num_drawn)


NOTHING_SEEN = SeenTokens(array("i"), array("i"))


class SampleInput(msgspec.Struct, frozen=True, gc=False):
    """What sampling one request's next token needs besides its logits.

    seed: never None here; the draw for absolute position `position` depends on (seed, position).
    seen: only filled when params.has_penalties.
    banned_token_ids: not to be sampled now (end tokens before min_tokens, ends of bad words).
    bitmask: what the request, and its grammar, allow now (lora_serve/bitmask.py); None where all
        tokens are allowed.
    """

    params: SamplingParams
    seed: int
    position: int
    seen: SeenTokens = NOTHING_SEEN
    banned_token_ids: Sequence[int] = ()
    bitmask: bytes | None = None

    @property
    def is_screenable(self) -> bool:
        """Whether all that it asks is which logit is the largest of those allowed."""
        draws_the_largest = self.params.is_greedy or self.params.top_k == 1
        return draws_the_largest and self.asks_for_a_token_alone

    @property
    def asks_for_a_token_alone(self) -> bool:
        """Whether logits as they are, of the tokens allowed, say all that it asks: a token."""
        return self.params.logprobs is None and not self._changes_single_logits

    @property
    def changes_logits(self) -> bool:
        return self.bitmask is not None or self._changes_single_logits

    @property
    def _changes_single_logits(self) -> bool:
        params = self.params
        return bool(self.banned_token_ids or params.logit_bias or params.has_penalties)


class PromptScoring(msgspec.Struct, frozen=True, gc=False):
    """Prompt logprobs of a chunk's rows: first_row + i predicts target_ids[i].

    num_top: how many alternatives each gets.
    """

    target_ids: Sequence[int]
    num_top: int
    first_row: int = 0


class AskedOutputs(msgspec.Struct, frozen=True, gc=False):
    """What is asked of a chunk's rows: of a chunk in the middle of a prompt, nothing.

    samples: a token of each of the last rows, in their order. The chunk's tokens behind the first
        of these rows are drafts: guesses of what the rows before them sample.
    scoring: prompt logprobs, of rows from its first_row on.
    num_pooled: the final hidden state of so many of the last rows.
    sums_hidden: the sums of the final hidden states of all rows.
    """

    samples: tuple[SampleInput, ...] = ()
    scoring: PromptScoring | None = None
    num_pooled: int = 0
    sums_hidden: bool = False

    @property
    def takes_hidden(self) -> bool:
        """Whether hidden states are asked for to be more than sampled from."""
        return self.scoring is not None or self.num_pooled > 0 or self.sums_hidden

    @property
    def num_drafts(self) -> int:
        return max(0, len(self.samples) - 1)

    def num_rows(self, num_tokens: int) -> int:
        """How many of a chunk's num_tokens rows give a hidden state: the last ones, or all."""
        if self.sums_hidden:
            return num_tokens
        if self.scoring is not None and self.scoring.target_ids:
            return num_tokens - self.scoring.first_row
        return max(len(self.samples), self.num_pooled)


NOTHING_ASKED = AskedOutputs()


class DraftChunk(msgspec.Struct, frozen=True, gc=False):
    """What the draft model does for a request, once the step has drawn its tokens.

    It computes token_ids, whose first has position `start`. With num_drafts it goes on with the
    tokens that were drawn, by this step and, if its chunk has a token_from, by the one before; and
    guesses so many tokens that follow them.

    token_ids: known tokens. block_tables: of its own pool, for all positions that it may write.
    fed: the guesses behind token_ids that it computed before, as far as they are drawn by now.
    """

    start: int
    token_ids: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    num_drafts: int = 0
    fed: Sequence[int] = ()


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute tokens [start, start + len(token_ids)).

    token_ids: 0 where `embeds` supplies the row instead, or `token_from` says where the token is.
        The last asked.num_drafts of them are drafts. Their KV counts as computed as far as the rows
        before them sample just these tokens, and is overwritten by the next step from there on.
    block_tables: of each group of layers the blocks for positions [0, start + len(token_ids)), in
        order. What stands for blocks that none of these tokens sees is not to be looked at.
    asked: samples when the chunk ends at the last token there is, or at drafts behind it.
    embeds: rows of prompt_embeds among this chunk's tokens, in the model's dtype, hidden_size
        values each.
    token_from: set where the only token is pending, drawn and not known yet: the step before this
        one draws it for the request at this index there. `asked` does not count it.
    adapter_start: the adapter acts from this position on; rows before it are the base model's.
    draft_chunk: what the draft model does for it; None for nothing.
    """

    request_id: str
    adapter: AdapterRef | NoAdapter
    start: int
    token_ids: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    asked: AskedOutputs = NOTHING_ASKED
    embeds: PlacedRows = NO_ROWS
    token_from: int | None = None
    adapter_start: int = 0
    draft_chunk: DraftChunk | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def draft_token_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.asked.num_drafts :]

    @property
    def num_next_drafts(self) -> int:
        """How many tokens the draft model guesses behind those that the step draws."""
        return 0 if self.draft_chunk is None else self.draft_chunk.num_drafts

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class KVLoad:
    """One block's KV, as a worker once gathered it, to be put into block `block_id`.

    data: the block's part of a record of kv_saves.
    """

    block_id: int
    data: bytes | bytearray | memoryview


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step. Its parts happen in this order: adapters, kv_saves, kv_loads, requests.

    kv_saves: blocks to gather into bytes, for each record those of all groups one after the other;
        first, because any block may be written in this step.
    kv_loads: blocks to fill, which the step's requests may read.
    drop_adapters: digests whose weights no request of this or a later step uses; dropped first.
    add_adapters: digests that workers prepared before (`Worker.prepare_adapter`, in a loader
        thread) and that requests may name from this step on; one entry for each preparation.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    drop_adapters: tuple[bytes, ...] = ()
    add_adapters: tuple[bytes, ...] = ()
    kv_saves: tuple[int, ...] = ()
    kv_loads: tuple[KVLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum([len(request.token_ids) for request in self.requests])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that stands there, and the most likely ones.

    rank: 1 for the most likely token. top: (token_id, logprob), most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestStepOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one request; in the order of SchedulerOutput.requests.

    token_ids: what its rows sampled, up to and including the first that is not the draft.
    logprobs: of these tokens; empty unless asked for.
    pooled: hidden states (num_pooled, H), float32.
    hidden_sums: (H + 1), int64: the sums over the rows, in the units of `pooling.py`, then how many
        of the values are none that it sums.
    next_drafts: what the draft model guesses to follow token_ids.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""
    hidden_sums: bytes = b""
    next_drafts: tuple[int, ...] = ()


def accepted(sampled: Sequence[int], draft_token_ids: Sequence[int]) -> tuple[int, ...]:
    """What rows sampled, up to and including the first that is not the draft behind its row.

    sampled: one more than drafts; empty where nothing was asked.
    """
    for count, (token_id, draft) in enumerate(zip(sampled, draft_token_ids, strict=False), 1):
        if token_id != draft:
            return tuple(sampled[:count])
    return tuple(sampled)


def num_same(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for count, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return count
    return min(len(some), len(others))


class ModelRunnerOutput(msgspec.Struct, frozen=True, gc=False):
    """All that came out of a step. kv_saves: the records of the step's kv_saves, in their order."""

    step_id: int
    requests: tuple[RequestStepOutput, ...]
    kv_saves: tuple[bytes, ...] = ()
