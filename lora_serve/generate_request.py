"""`GenerateRequest`: what a caller asks for, one value from the routes to the engine.

A new field is written where a body is parsed (`server/openai`), here, and where it acts.
"""

from __future__ import annotations

import msgspec

from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import Prompt
from lora_serve.sampling_params import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued params.n times, or of which an embedding is wanted.

    request_id: its own among all that are being answered. client_request_id: what its caller calls
        it, alone or with others.
    route: the path by which it came, as the table of routes has it; "" if it came by none.
    pooling: how an embedding is made of the prompt; nothing is sampled then. None without one.
    lora_name: the adapter that answers, or BASE_MODEL.
    tenant: a digest of the API key it came with, whose share it counts to with --fair-share key.
    is_streamed: False if the client sees nothing before the end. Its deltas are held back until
        then, so that the request can be sent again to a new engine if this one dies.
    shown_special_tokens: are a part of the text all the same when params.skip_special_tokens leaves
        out the others.
    do_remote_decode: another server is to go on with the prompt. The answer ends when its KV can be
        found there, or has been waited for long enough.
    """

    request_id: str
    client_request_id: str = ""
    route: str = ""
    prompt: Prompt
    params: SamplingParams
    lora_name: str | NoAdapter = BASE_MODEL
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    is_streamed: bool = True
    shown_special_tokens: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    do_remote_decode: bool = False
