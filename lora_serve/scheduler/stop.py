"""When an answer is over, as far as token ids can tell (stop strings are the API's)."""

from __future__ import annotations

from lora_serve.scheduler.request import Request


def finish_after(request: Request) -> tuple[str | None, int | None]:
    """Why the request ends with its present tokens: (finish_reason, stop_token_id), or Nones.

    finish_reason: "stop" for an end or stop token (stop_token_id names the latter), "length" at
    max_tokens. Nothing ends before the prompt is computed, or by a token before min_tokens; an
        embedding is there with the prompt.
    """
    if request.num_computed_tokens < request.num_prompt_tokens:
        return None, None
    if request.pooling is not None:
        return "stop", None
    params = request.params
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = request.token_ids[-1]
        if last in params.stop_token_id_set:
            return "stop", last
        if last in request.eos_token_ids:
            return "stop", None
    if num_output_tokens >= request.max_tokens:
        return "length", None
    return None, None
