"""What an engine finds out before its first step, from its config and the model that was loaded."""

from __future__ import annotations

from lora_serve.config import EngineConfig
from lora_serve.kv_groups import KVNeeds, tokens_in_flight
from lora_serve.messages import EngineReady
from lora_serve.model_info import ModelInfo


def num_steps_ahead(config: EngineConfig, model: ModelInfo) -> int:
    """How many steps may be scheduled before the oldest one is reported.

    Drafts stand behind known tokens, so steps do not overlap where there are any, unless it is
    asked for.
    """
    is_overlapped = config.scheduler.async_scheduling
    if is_overlapped is None:
        is_overlapped = model.is_asynchronous and not config.speculative.is_enabled
    return int(is_overlapped)


def most_tokens_in_flight(config: EngineConfig, model: ModelInfo) -> int:
    """How many tokens of one request the steps in flight may compute, as `KVNeeds` has it."""
    num_steps = 1 + num_steps_ahead(config, model)
    return tokens_in_flight(
        model.kv_groups,
        config.cache.block_size,
        num_blocks=model.num_blocks,
        max_model_len=model.max_model_len,
        wanted=num_steps * config.scheduler.max_num_batched_tokens,
        least=num_steps,
    )


def engine_ready(model: ModelInfo, needs: KVNeeds) -> EngineReady:
    """What the API process must know of the model."""
    longest = needs.longest_request(model.num_blocks, model.max_model_len)
    return EngineReady(
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        kernels=model.kernels,
        max_request_tokens=longest,
        num_longest_requests=model.num_blocks // max(1, needs.blocks_of_request(longest)),
        kv_bytes=model.num_blocks * model.kv_block_bytes // max(1, len(model.kv_groups)),
        architecture=model.architecture,
        device=model.device,
        num_threads=model.num_threads,
        num_parameters=model.num_parameters,
        weights=model.weights,
        draft_model=model.draft_model,
    )
