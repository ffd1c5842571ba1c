"""GET /server_info and /get_world_size: what trainers ask a server before they use it.

The fields are those of vLLM's configuration, as far as they are here. No secrets; paths on this
machine are shown to those who may change the server alone.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.server.admin.answers import (
    CacheInfo,
    LoRAInfo,
    ModelInfo,
    ParallelInfo,
    SchedulerInfo,
    ServerInfo,
    ServerSettings,
    WorldSize,
)
from lora_serve.server.admin.query import Query
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response

FORMATS = ("text", "json")


def server_info_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/server_info")
    async def server_info(request: Request) -> Response:
        config_format = Query(request, "config_format").one_of("config_format", FORMATS, "text")
        settings = server_settings(context, shows_paths=caller_of(request).is_admin)
        if config_format == "json":
            return json_response(ServerInfo(settings))
        return json_response(ServerInfo(msgspec.json.encode(settings).decode()))

    @router.get("/get_world_size")
    async def get_world_size(request: Request) -> Response:
        Query(request, "include_dp").flag("include_dp", default=True)
        return json_response(WorldSize(context.engine.config.parallel.tensor_parallel_size))

    return router


def server_settings(context: ServerContext, *, shows_paths: bool) -> ServerSettings:
    config, info, names = context.engine.config, context.engine.model_info, context.models.names
    lora = config.lora
    return ServerSettings(
        model_config=ModelInfo(
            model=config.model.model if shows_paths else names[0],
            served_model_name=list(names),
            dtype=info.dtype,
            quantization=config.model.quantization,
            max_model_len=info.max_model_len,
            max_logprobs=config.model.max_logprobs,
            logprobs_mode=config.model.logprobs_mode,
        ),
        cache_config=CacheInfo(
            block_size=config.cache.block_size,
            num_gpu_blocks=info.num_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        ),
        scheduler_config=SchedulerInfo(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            policy=config.scheduler.scheduling_policy,
        ),
        parallel_config=ParallelInfo(
            config.parallel.tensor_parallel_size,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
        ),
        lora_config=LoRAInfo(lora.max_lora_rank, lora.max_loras) if lora.enable_lora else None,
    )
