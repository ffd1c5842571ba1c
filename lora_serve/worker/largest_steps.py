"""Steps that take as much memory as any step can, for measuring it. They compute nothing of use.

All positions lie in block 0, so that a cache of one block serves.
"""

from __future__ import annotations

from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, ScheduledRequest
from lora_serve.worker.model_runner import LOGITS_ROWS_AT_ONCE

# Every step of sampling, with as many alternatives as a request may ask for.
_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=1000, min_p=0.01, presence_penalty=0.1, logprobs=20
)


def largest_steps(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[tuple[ScheduledRequest, ...]]:
    """One of prompts that fill the token budget; one of all seats decoding at the last position."""
    num_seats = min(max_num_seqs, max_num_batched_tokens)
    lengths: list[int] = []
    while sum(lengths) < max_num_batched_tokens and len(lengths) < num_seats:
        lengths.append(min(max_model_len, max_num_batched_tokens - sum(lengths)))
    prompts = tuple(_request(i, 0, length, block_size) for i, length in enumerate(lengths))
    decodes = tuple(_request(i, max_model_len - 1, 1, block_size) for i in range(num_seats))
    return [prompts, decodes]


def _request(index: int, start: int, num_tokens: int, block_size: int) -> ScheduledRequest:
    end = start + num_tokens
    return ScheduledRequest(
        request_id=f"largest-{index}",
        adapter=None,
        start=start,
        token_ids=[0] * num_tokens,
        block_ids=[0] * -(-end // block_size),
        sample=SampleInput(_PARAMS, seed=0, position=end),
        num_prompt_logprobs=1,
        prompt_logprob_targets=[0] * min(num_tokens, LOGITS_ROWS_AT_ONCE) if index == 0 else (),
    )
