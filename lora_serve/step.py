"""One step as a value: all that a worker needs, and all that comes out.

Workers hold weights, KV and adapters, but no request: any step can be logged, replayed, tested.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.kv_groups import KVGroup
from lora_serve.sampling_params import SamplingParams


class SeenTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a prompt and of its answer so far, each once.

    num_drawn: how often the answer has each; 0 for those of the prompt alone.
    """

    token_ids: array[int]
    num_drawn: array[int]

    def and_drawn(self, token_id: int) -> SeenTokens:
        """The same when the answer has one more."""
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
    banned_token_ids: not to be sampled now (end tokens before min_tokens).
    bitmask: what a grammar allows now: token i where bit i % 8 of byte i // 8 is set, and none
        behind its last byte; None where all are allowed.
    """

    params: SamplingParams
    seed: int
    position: int
    seen: SeenTokens = NOTHING_SEEN
    banned_token_ids: Sequence[int] = ()
    bitmask: bytes | None = None

    @property
    def is_screenable(self) -> bool:
        """Whether it is greedy and asks nothing of the logits but which is the largest."""
        params = self.params
        return params.is_greedy and params.logprobs is None and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return (
            bool(self.banned_token_ids or params.logit_bias or params.has_penalties)
            or self.bitmask is not None
        )


class PromptScoring(msgspec.Struct, frozen=True, gc=False):
    """Prompt logprobs: row i of a chunk predicts target_ids[i], with num_top alternatives."""

    target_ids: Sequence[int]
    num_top: int


class AskedOutputs(msgspec.Struct, frozen=True, gc=False):
    """What is asked of a chunk's rows: of a chunk in the middle of a prompt, nothing.

    samples: a token of each of the last rows, in their order. The chunk's tokens behind the first
        of these rows are drafts: guesses of what the rows before them sample. Nothing drafts
        yet: only tests make steps with drafts.
    scoring: prompt logprobs, of the first rows.
    num_pooled: the final hidden state of so many of the last rows. No request asks for one yet.
    """

    samples: tuple[SampleInput, ...] = ()
    scoring: PromptScoring | None = None
    num_pooled: int = 0

    @property
    def num_drafts(self) -> int:
        return max(0, len(self.samples) - 1)

    def num_rows(self, num_tokens: int) -> int:
        """How many of a chunk's num_tokens rows give a hidden state: the last ones, or all."""
        if self.scoring is not None and self.scoring.target_ids:
            return num_tokens
        return max(len(self.samples), self.num_pooled)


NOTHING_ASKED = AskedOutputs()


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step: compute tokens [start, start + len(token_ids)).

    token_ids: 0 where `embeds` supplies the row instead, or `token_from` says where the token is.
        The last asked.num_drafts of them are drafts. Their KV counts as computed as far as the rows
        before them sample just these tokens, and is overwritten by the next step from there on.
    block_tables: of each group of layers the blocks for positions [0, start + len(token_ids)), in
        order. What stands for blocks that none of these tokens sees is not to be looked at.
    asked: samples when the chunk ends at the last token there is, or at drafts behind it.
    embeds: rows of prompt_embeds for the first tokens of this chunk, in the model's dtype,
        hidden_size values each; empty when there are none.
    token_from: set where the only token is pending, drawn and not known yet: the step before this
        one draws it for the request at this index there. `asked` does not count it.
    adapter_start: the adapter acts from this position on; rows before it are the base model's. It
        is always 0 as yet, since the identity of blocks does not say where an adapter begins.
    """

    request_id: str
    adapter: AdapterRef | NoAdapter
    start: int
    token_ids: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    asked: AskedOutputs = NOTHING_ASKED
    embeds: bytes = b""
    token_from: int | None = None
    adapter_start: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def draft_token_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.asked.num_drafts :]

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


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
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
        return sum(request.num_tokens for request in self.requests)


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
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: bytes = b""


def accepted(sampled: Sequence[int], draft_token_ids: Sequence[int]) -> tuple[int, ...]:
    """What rows sampled, up to and including the first that is not the draft behind its row.

    sampled: one more than drafts; empty where nothing was asked.
    """
    for count, (token_id, draft) in enumerate(zip(sampled, draft_token_ids, strict=False), 1):
        if token_id != draft:
            return tuple(sampled[:count])
    return tuple(sampled)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """All that came out of a step. kv_saves: the records of the step's kv_saves, in their order."""

    step_id: int
    requests: tuple[RequestStepOutput, ...]
    kv_saves: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as a checkpoint stores it: safetensors' dtype name ("F32", "BF16", "F16")."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """The low-rank delta of one projection: y += scale * (x @ a.T) @ b.T.

    name: as in the base checkpoint, e.g. "model.layers.0.self_attn.q_proj".
    a: (rank, in_features). b: (out_features, rank).
    """

    name: str
    rank: int
    scale: float
    a: RawTensor
    b: RawTensor


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """One adapter, verified: `digest` is over the bytes that `modules` hold."""

    path: str
    digest: bytes
    rank: int
    num_bytes: int
    base_model: str
    modules: tuple[LoRAModule, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the model that the workers have loaded.

    fingerprint: over weights, dtype, KV layout and numerics; in every block's identity.
    lora_modules: (out_features, in_features) of each projection an adapter may change.
    num_blocks: size of the KV pool that the workers made. kv_groups: whose blocks these may be.
    kv_block_bytes, kv_layout: size of a record of kv_saves (a block of each group), and what else
        its bytes depend on; two engines can exchange records only if both are equal.
    is_asynchronous: whether a step runs while its caller goes on.
    """

    fingerprint: bytes
    dtype: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    num_blocks: int
    kernels: str
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    lora_modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv_block_bytes: int = 0
    kv_layout: bytes = b""
    is_asynchronous: bool = False
