"""Steps that take as much memory as any step can, and every kernel: to be run before any other.

They compute nothing of use. All positions lie in block 0, so that a cache of one block serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import AskedOutputs, PromptScoring, SampleInput, ScheduledRequest
from lora_serve.worker.model_runner import LOGITS_ROWS_AT_ONCE

# Every step of sampling, with as many alternatives as a request may ask for.
_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=1000, min_p=0.01, presence_penalty=0.1, logprobs=20
)


def largest_adapter(modules: Mapping[str, tuple[int, int]], rank: int) -> AdapterCheckpoint:
    """An adapter of zeros on all modules. modules: as in ModelInfo.lora_modules."""
    zeros = memoryview(bytes(2 * rank * max(max(sizes) for sizes in modules.values())))

    def raw(*shape: int) -> RawTensor:
        return RawTensor("BF16", shape, zeros[: 2 * shape[0] * shape[1]])

    path = "the largest adapter"
    parts = tuple(
        LoRAModule(name, rank, 1.0, raw(rank, in_features), raw(out_features, rank))
        for name, (out_features, in_features) in modules.items()
    )
    num_bytes = sum(len(part.a.data) + len(part.b.data) for part in parts)
    return AdapterCheckpoint(path, sha256(path.encode()).digest(), rank, num_bytes, "", parts)


def largest_steps(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_groups: int = 1,
    adapter: AdapterRef | NoAdapter = BASE_MODEL,
) -> list[tuple[ScheduledRequest, ...]]:
    """Steps of three kinds, all requests with the adapter.

    Prompts that fill the token budget; max_num_seqs requests decoding at the last position; and
    one of them alone, for kernels of few rows.
    """
    num_requests = min(max_num_seqs, max_num_batched_tokens)
    lengths: list[int] = []
    while sum(lengths) < max_num_batched_tokens and len(lengths) < num_requests:
        lengths.append(min(max_model_len, max_num_batched_tokens - sum(lengths)))
    last = max_model_len - 1
    same = block_size, num_groups, adapter
    prompts = tuple(_request(i, 0, n, *same) for i, n in enumerate(lengths))
    decodes = tuple(_request(i, last, 1, *same) for i in range(num_requests))
    return [prompts, decodes, decodes[:1]]


def _request(
    index: int,
    start: int,
    num_tokens: int,
    block_size: int,
    num_groups: int,
    adapter: AdapterRef | NoAdapter,
) -> ScheduledRequest:
    end = start + num_tokens
    scoring = PromptScoring([0] * min(num_tokens, LOGITS_ROWS_AT_ONCE), 1) if index == 0 else None
    return ScheduledRequest(
        request_id=f"largest-{index}",
        adapter=adapter,
        start=start,
        token_ids=[0] * num_tokens,
        block_tables=[[0] * -(-end // block_size)] * num_groups,
        asked=AskedOutputs(
            (SampleInput(_PARAMS, seed=0, position=end),),
            scoring,
            num_pooled=1,
            sums_hidden=index == 0,
        ),
    )
