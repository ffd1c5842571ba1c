"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and words.

Whatever is wrong with an adapter is the caller's to mend, so it is never a 500.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lora_serve.engine.frontend.base_model import other_base_model
from lora_serve.errors import AdapterError, AdapterNotFoundError, HubNotAllowedError
from lora_serve.messages import AdapterInfo
from lora_serve.server.admin.audit import AdapterAudit
from lora_serve.server.admin.protocol import LoadAdapterBody, UnloadAdapterBody
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of

MAX_LORA_NAME_CHARS = 256


def adapters_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    engine = context.engine

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        with AdapterAudit("load", caller_of(request)) as audit:
            context.keys.require_admin(request)
            body = await context.bodies.read(request, LoadAdapterBody)
            audit.note_asked(body.lora_name, body.lora_path)
            _require_enabled(context)
            _check_name_and_path(context, body.lora_name, body.lora_path)
            await _note_before(audit, context, body.lora_name)
            adapter = await _load(context, body)
            audit.note_after(adapter.digest)
        told = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        warning = other_base_model(engine.config.model, adapter)
        return PlainTextResponse(told if warning is None else f"{told} Warning: {warning}.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        with AdapterAudit("unload", caller_of(request)) as audit:
            context.keys.require_admin(request)
            body = await context.bodies.read(request, UnloadAdapterBody)
            audit.note_asked(body.lora_name)
            _require_enabled(context)
            if not body.lora_name:
                raise AdapterError("'lora_name' needs to be provided to unload a LoRA adapter.")
            await _note_before(audit, context, body.lora_name)
            await engine.unload_lora_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


async def _note_before(audit: AdapterAudit, context: ServerContext, name: str) -> None:
    for adapter in await context.engine.list_adapters():
        if adapter.name == name:
            audit.note_before(adapter.digest, adapter.path)


async def _load(context: ServerContext, body: LoadAdapterBody) -> AdapterInfo:
    name = body.lora_name
    try:
        return await context.engine.load_lora_adapter(
            name, body.lora_path, body.load_inplace, pinned=body.pinned
        )
    except HubNotAllowedError:
        raise
    except AdapterNotFoundError as error:
        raise AdapterNotFoundError(f"Loading lora {name} failed: {error}", "lora_path") from error


def _require_enabled(context: ServerContext) -> None:
    if not context.engine.config.lora.enable_lora:
        raise AdapterError("LoRA is not enabled; start the server with --enable-lora")


def _check_name_and_path(context: ServerContext, name: str, path: str) -> None:
    if not (name and path):
        raise AdapterError("Both 'lora_name' and 'lora_path' must be provided.")
    if context.models.is_taken(name):
        raise AdapterError(f"The lora adapter '{name}' conflicts with a served base model.")
    if len(name) > MAX_LORA_NAME_CHARS or not name.isprintable():
        raise AdapterError(
            f"lora_name must have at most {MAX_LORA_NAME_CHARS} characters, all of them printable, "
            f"got {len(name)} beginning {name[:20]!r}"
        )
    if "\0" in path:
        raise AdapterError("lora_path must not contain a NUL character")
