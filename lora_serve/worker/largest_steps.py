"""Steps that take as much memory as any step can, and every kernel: to be run before any other.

They compute nothing of use. All positions lie in block 0, so that a cache of one block serves.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from lora_serve.adapter_checkpoint import (
    AdapterCheckpoint,
    LoRAModule,
    RawTensor,
    TokenRows,
    num_tensor_bytes,
)
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.model_info import Vocabulary
from lora_serve.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams
from lora_serve.step import AskedOutputs, PromptScoring, SampleInput, ScheduledRequest, SeenTokens
from lora_serve.worker.model_runner import LOGITS_ROWS_AT_ONCE

# Of one request's prompt logprobs at a time: more of them are told in no answer of the server.
MOST_SCORED_ENTRIES = 2**19
_NO_MODULES: Mapping[str, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds a step. max_logprobs: -1 for the whole vocabulary. num_groups: of KV layers.

    max_draft_rows: that steps with drafts sample, of all requests together; 0 without any.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    block_size: int
    num_groups: int = 1
    max_draft_rows: int = 0

    @property
    def num_top(self) -> int:
        """How many alternatives logprobs may ask for."""
        return self.vocab_size if self.max_logprobs == -1 else self.ids(self.max_logprobs)

    def ids(self, count: int) -> int:
        """How many different token ids there are of `count` that are asked for."""
        return min(count, self.vocab_size)


def largest_adapter(
    modules: Mapping[str, tuple[int, int]],
    lora_rank: int,
    vocabulary: Vocabulary | None = None,
    experts: Mapping[str, tuple[int, int]] = _NO_MODULES,
    expert_lora_rank: int = 0,
) -> AdapterCheckpoint:
    """An adapter of zeros on all modules, and on a row of each of the vocabulary's matrices.

    modules, experts: as in ModelInfo.lora_modules, of one rank's share of the model; modules with
    the vocabulary's and without the experts'.
    """
    ranked = [(name, sizes, lora_rank) for name, sizes in modules.items()]
    ranked += [(name, sizes, expert_lora_rank) for name, sizes in experts.items()]
    zeros = memoryview(bytes(2 * lora_rank * max(max(sizes) for _, sizes, _ in ranked)))

    def raw(*shape: int) -> RawTensor:
        return RawTensor("BF16", shape, zeros[: 2 * shape[0] * shape[1]])

    path = "the largest adapter"
    parts = tuple(
        LoRAModule(name, r, 1.0, raw(r, in_features), raw(out_features, r))
        for name, (out_features, in_features), r in ranked
    )
    token_rows: tuple[TokenRows, ...] = ()
    if vocabulary is not None:
        width = modules[vocabulary.embedding][0]
        token_rows = (
            TokenRows(vocabulary.embedding, (0,), raw(1, width)),
            TokenRows(vocabulary.head, (0,), raw(1, vocabulary.hidden_size)),
        )
    num_bytes = num_tensor_bytes((parts, token_rows))
    digest = sha256(path.encode()).digest()
    return AdapterCheckpoint(path, digest, lora_rank, num_bytes, "", parts, token_rows=token_rows)


def largest_steps(
    limits: StepLimits, adapter: AdapterRef | NoAdapter = BASE_MODEL
) -> list[tuple[ScheduledRequest, ...]]:
    """Steps of three kinds, all requests with the adapter.

    Prompts that fill the token budget; max_num_seqs requests decoding at the last position; one of
    them alone, for kernels of few rows; and one with as many drafts as there may be.
    """
    num_tokens, longest = limits.max_num_batched_tokens, limits.max_model_len
    num_requests = min(limits.max_num_seqs, num_tokens)
    lengths: list[int] = []
    while sum(lengths) < num_tokens and len(lengths) < num_requests:
        lengths.append(min(longest, num_tokens - sum(lengths)))
    sample = largest_sample(limits)
    prompts = tuple(_request(i, 0, n, limits, sample, adapter) for i, n in enumerate(lengths))
    decodes = tuple(
        _request(i, longest - 1, 1, limits, sample, adapter) for i in range(num_requests)
    )
    steps = [prompts, decodes, decodes[:1]]
    num_rows = min(limits.max_draft_rows, num_tokens, longest)
    if num_rows > 1:
        drafted = _request(0, longest - num_rows, num_rows, limits, sample, adapter, num_rows)
        steps.append((drafted,))
    return steps


def largest_sample(limits: StepLimits) -> SampleInput:
    """Every step of sampling, each with as much as a request may ask of it."""
    params = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        top_k=1000,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=dict.fromkeys(range(limits.ids(MAX_LOGIT_BIASES)), 1.0),
        logprobs=limits.num_top,
    )
    num_seen = limits.ids(limits.max_model_len)
    return SampleInput(
        params,
        seed=0,
        position=limits.max_model_len,
        seen=SeenTokens(array("i", range(num_seen)), array("i", [1]) * num_seen),
        banned_token_ids=range(limits.ids(MAX_BAD_WORDS)),
        bitmask=b"\xff" * -(-limits.vocab_size // 8),
    )


def _request(
    index: int,
    start: int,
    num_tokens: int,
    limits: StepLimits,
    sample: SampleInput,
    adapter: AdapterRef | NoAdapter,
    num_samples: int = 1,
) -> ScheduledRequest:
    num_blocks = -(-(start + num_tokens) // limits.block_size)
    num_scored = min(
        num_tokens, LOGITS_ROWS_AT_ONCE, max(1, MOST_SCORED_ENTRIES // (limits.num_top + 1))
    )
    return ScheduledRequest(
        request_id=f"largest-{index}",
        adapter=adapter,
        start=start,
        token_ids=[0] * num_tokens,
        block_tables=[[0] * num_blocks] * limits.num_groups,
        asked=AskedOutputs(
            (sample,) * num_samples,
            PromptScoring([0] * num_scored, limits.num_top) if index == 0 else None,
            num_pooled=num_tokens,
            sums_hidden=index == 0,
        ),
    )
