"""One step as a value: all that a worker needs, and all that comes out.

Workers hold weights, KV and adapters, but no request: any step can be logged, replayed, tested.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lora_serve.identity import AdapterRef
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
        if token_id not in token_ids:
            token_ids.append(token_id)
            num_drawn.append(0)
        num_drawn[token_ids.index(token_id)] += 1
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


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: compute tokens [start, start + len(token_ids)).

    token_ids: 0 where `embeds` supplies the row instead, or `token_from` tells of the token.
    token_from: set where the only token is one that nobody was told yet: the request's share of the
        step before this one draws it, and stands there at this index. `sample` does not count it.
    embeds: rows of prompt_embeds for the first tokens of this chunk, in the model's dtype,
        hidden_size values each; empty when there are none.
    block_ids: blocks for positions [0, start + len(token_ids)), in order.
    sample: set when the chunk ends at the last token there is, so that its logits give the next.
    prompt_logprob_targets: the prompt token after each computed position, while prompt_logprobs
        are asked for; row i of the chunk predicts prompt_logprob_targets[i].
    """

    request_id: str
    adapter: AdapterRef | None
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    sample: SampleInput | None = None
    embeds: bytes = b""
    num_prompt_logprobs: int = 0
    prompt_logprob_targets: Sequence[int] = ()
    token_from: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class KVLoad:
    """One block's KV, as a worker once gathered it, to be put into block `block_id`."""

    block_id: int
    data: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Its parts happen in this order: adapters, kv_saves, kv_loads, requests.

    kv_saves: blocks to gather into bytes; first, because any block may be written in this step.
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
    """Log-probabilities at one position: the token that stands there, and the likeliest ones.

    rank: 1 for the likeliest token. top: (token_id, logprob), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestStepOutput(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one request; in the order of SchedulerOutput.requests.

    token_id: None when the request did not sample. logprobs: None unless asked for.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """All that came out of a step. kv_saves: the bytes of the step's kv_saves, in their order."""

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
    num_blocks: size of the KV pool that the workers made.
    kv_block_bytes, kv_layout: size of a gathered block, and what else its bytes depend on; two
        engines can exchange blocks only if both are equal.
    is_asynchronous: whether a step runs while its caller goes on.
    """

    fingerprint: bytes
    dtype: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    num_blocks: int
    kernels: str
    lora_modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv_block_bytes: int = 0
    kv_layout: bytes = b""
    is_asynchronous: bool = False
