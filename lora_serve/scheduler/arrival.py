"""What the engine makes of a message that asks for answers: a request for each choice."""

from __future__ import annotations

from lora_serve.identity import BlockHasher, CacheNamespace
from lora_serve.messages import Choice, EngineRequest
from lora_serve.prompts import EmbedsPrompt, TokensPrompt
from lora_serve.scheduler.bad_words import BadWords
from lora_serve.scheduler.request import Request, SortKey


def request_from_message(
    message: EngineRequest,
    choice: Choice,
    *,
    namespace: CacheNamespace,
    hasher: BlockHasher,
    block_size: int,
    sort_key: SortKey,
    share: str = "",
    adapter_start: int = 0,
) -> Request:
    """Build one choice of what a message asks for; `engine/frontend/input.py` has checked it."""
    prompt, params = message.request.prompt, message.request.params
    embeds = None if isinstance(prompt, TokensPrompt) else prompt
    is_all_rows = isinstance(prompt, EmbedsPrompt)
    token_ids = [0] * prompt.num_tokens if is_all_rows else list(prompt.token_ids)
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
        adapter_start=adapter_start,
        share=share,
        tenant=message.request.tenant,
        do_remote_decode=message.request.do_remote_decode,
        pooling=message.request.pooling,
        allowed=message.rules.allowed,
        bad_words=BadWords(message.rules.bad_words) if message.rules.bad_words else None,
    )
