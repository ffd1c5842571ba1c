"""Routes that load and unload adapters, as vLLM, SGLang, Dynamo and SageMaker have them.

They are one operation in several forms; an adapter that comes in a body is first written to files.
Whatever is wrong with an adapter is the caller's to mend, so it is never a 500.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lora_serve.catalog.rollout import Rollout
from lora_serve.engine.frontend.base_model import other_base_model
from lora_serve.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    HubNotAllowedError,
    LoraServeError,
)
from lora_serve.messages import AdapterInfo
from lora_serve.server.adapter_names.base import Loaded
from lora_serve.server.adapter_names.catalogued import no_bodies
from lora_serve.server.admin.adapter_tensors import check_checksums, read_tensors
from lora_serve.server.admin.answers import (
    AdapterChangeList,
    LoadedAdapter,
    LoadedAdapters,
    LoRAList,
    LoRAStatus,
)
from lora_serve.server.admin.audit import AdapterAudit
from lora_serve.server.admin.protocol import (
    AdapterWish,
    LoadAdapterBody,
    LoadTensorsBody,
    LoRASourceBody,
    RootLoadAdapterBody,
    SageMakerAdapterBody,
    UnloadAdapterBody,
)
from lora_serve.server.admin.rollouts import rollout_card
from lora_serve.server.context import ServerContext
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response


def adapters_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        loaded = await _load(context, request, LoadAdapterBody)
        return _added(context, loaded, accepts_json=_accepts_json(request))

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        return _removed(*await _unload(context, request))

    @router.post("/load_lora_adapter")
    async def load_at_root(request: Request) -> Response:
        loaded = await _load(context, request, RootLoadAdapterBody)
        return json_response(LoadedAdapters(await _paths(context)), loaded.headers)

    @router.post("/unload_lora_adapter")
    async def unload_at_root(request: Request) -> Response:
        await _unload(context, request)
        return json_response(LoadedAdapters(await _paths(context)))

    @router.post("/v1/loras")
    async def load_from_source(request: Request) -> Response:
        loaded = await _load(context, request, LoRASourceBody)
        return json_response(LoRAStatus(lora_name=loaded.adapter.name), loaded.headers)

    @router.delete("/v1/loras/{lora_name:path}")
    async def unload_by_path(request: Request, lora_name: str) -> Response:
        await _unload(context, request, lora_name)
        return json_response(LoRAStatus(lora_name=lora_name))

    @router.post("/adapters")
    async def load_for_sagemaker(request: Request) -> Response:
        return _added(context, await _load(context, request, SageMakerAdapterBody))

    @router.delete("/adapters/{lora_name:path}")
    async def unload_for_sagemaker(request: Request, lora_name: str) -> Response:
        return _removed(*await _unload(context, request, lora_name))

    _route_from_tensors(router, context)
    _route_lists(router, context)
    return router


def _route_from_tensors(router: APIRouter, context: ServerContext) -> None:
    @router.post("/load_lora_adapter_from_tensors")
    async def load_from_tensors(request: Request) -> Response:
        loaded = await _load_tensors(context, request)
        return json_response(LoadedAdapters(await _paths(context)), loaded.headers)


def _route_lists(router: APIRouter, context: ServerContext) -> None:
    asked = "this asks for adapters' paths, unlike /v1/models,"

    @router.get("/v1/loras")
    async def list_loras(request: Request) -> Response:
        context.keys.require_admin(request, asked)
        _require_enabled(context)
        paths = await _paths(context)
        return json_response(LoRAList(loras=paths, count=len(paths)))

    @router.get("/adapter_changes")
    async def list_changes(request: Request) -> Response:
        context.keys.require_admin(request, asked)
        return json_response(AdapterChangeList(data=context.names.changes.newest_first()))


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """What stands under a name after a load.

    is_unchanged: the same bytes stood there before. rollout: where other servers follow.
    """

    adapter: AdapterInfo
    is_unchanged: bool
    rollout: Rollout | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The version, for callers of any form of the call."""
        return {
            "X-LoRA-Digest": self.adapter.digest,
            "X-LoRA-Generation": str(self.adapter.generation),
            "X-LoRA-Unchanged": str(self.is_unchanged).lower(),
            **_rollout_headers(self.rollout),
        }


def _rollout_headers(rollout: Rollout | None) -> dict[str, str]:
    if rollout is None:
        return {}
    how_far = "everywhere" if rollout.is_everywhere else "incomplete"
    return {"X-LoRA-Serial": str(rollout.record.serial), "X-LoRA-Rollout": how_far}


def _told(rollout: Rollout | None) -> str:
    """A sentence for the text of an answer; nothing where no other server follows."""
    if rollout is None:
        return ""
    if rollout.is_everywhere:
        num_replicas = len(rollout.replicas)
        return f" It is everywhere ({num_replicas} replica{'s' * (num_replicas != 1)})."
    return f" Warning: it is {rollout}."


def _added(context: ServerContext, loaded: LoadOutcome, *, accepts_json: bool = False) -> Response:
    """A text, as vLLM has it; or JSON with what the headers say, for callers who accept that."""
    adapter = loaded.adapter
    told = f"Success: LoRA adapter '{adapter.name}' added successfully."
    warning = other_base_model(context.engine.config.model, adapter)
    told += _told(loaded.rollout)
    if warning is not None:
        told = f"{told} Warning: {warning}."
    if not accepts_json:
        return PlainTextResponse(told, headers=loaded.headers)
    answer = LoadedAdapter(
        message=told,
        lora_name=adapter.name,
        digest=adapter.digest,
        generation=adapter.generation,
        unchanged=loaded.is_unchanged,
        rollout=UNSET if loaded.rollout is None else rollout_card(loaded.rollout),
    )
    return json_response(answer, loaded.headers)


def _accepts_json(request: Request) -> bool:
    """Whether the caller names JSON; */* is what clients send that read vLLM's text."""
    kinds = [kind.split(";")[0].strip() for kind in request.headers.get("accept", "").split(",")]
    return "application/json" in kinds and "text/plain" not in kinds


def _removed(name: str, rollout: Rollout | None) -> Response:
    told = f"Success: LoRA adapter '{name}' removed successfully.{_told(rollout)}"
    return PlainTextResponse(told, headers=_rollout_headers(rollout))


async def _load_tensors(context: ServerContext, request: Request) -> LoadOutcome:
    """Load the adapter that the body holds.

    What was begun is ended, also if the caller is gone: its files are the server's own.
    """
    with AdapterAudit("load", caller_of(request), context.names.changes) as audit:
        context.keys.require_admin(request)
        async with context.adapter_bodies.held(request, LoadTensorsBody) as body:
            audit.note_asked(body.lora_name)
            _require_enabled(context)
            if context.names.is_shared:
                raise no_bodies()
            context.models.check_adapter_name(body.lora_name)
            _note_before(audit, context, body.lora_name)
            adapter = await asyncio.shield(asyncio.create_task(_load_spooled(context, body, audit)))
        audit.note_after(adapter.digest)
    return LoadOutcome(adapter, audit.is_unchanged)


async def _load_spooled(
    context: ServerContext, body: LoadTensorsBody, audit: AdapterAudit
) -> AdapterInfo:
    path = await asyncio.to_thread(_spooled, context, body)
    audit.note_asked(body.lora_name, path)
    try:
        return await context.engine.load_lora_adapter(
            body.lora_name, path, body.load_inplace, pinned=body.pinned
        )
    finally:
        context.spool.settle(path)
        await _remove_unused(context)


def _spooled(context: ServerContext, body: LoadTensorsBody) -> str:
    tensors = read_tensors(body.payload)
    if body.expected_checksums is not None:
        check_checksums(tensors, body.expected_checksums)
    return context.spool.write(body.config_dict, tensors)


async def _remove_unused(context: ServerContext) -> None:
    """Remove files of adapters from bodies that neither a name nor a request has any more.

    Where there is no engine to say so, they stay until the next change.
    """
    settled = context.spool.settled
    if not settled:
        return
    with contextlib.suppress(LoraServeError):
        unused = settled - await context.engine.adapter_paths()
        await asyncio.to_thread(context.spool.remove, unused)


async def _load(
    context: ServerContext,
    request: Request,
    kind: type[LoadAdapterBody] | type[LoRASourceBody] | type[SageMakerAdapterBody],
) -> LoadOutcome:
    """Load what a body of this kind asks for."""
    caller = caller_of(request)
    with AdapterAudit("load", caller, context.names.changes) as audit:
        context.keys.require_admin(request)
        wish = (await context.bodies.read(request, kind)).wish
        audit.note_asked(wish.lora_name, wish.lora_path)
        _require_enabled(context)
        _check_name_and_path(context, wish.lora_name, wish.lora_path)
        _note_before(audit, context, wish.lora_name)
        loaded = await _published(context, wish, caller.shown)
        audit.note_after(loaded.adapter.digest)
        _note_serial(audit, loaded.rollout)
    await _remove_unused(context)
    return LoadOutcome(loaded.adapter, audit.is_unchanged, loaded.rollout)


async def _unload(
    context: ServerContext, request: Request, name: str | None = None
) -> tuple[str, Rollout | None]:
    """Unload the adapter of that name, or the one that the body names; returns the name."""
    caller = caller_of(request)
    with AdapterAudit("unload", caller, context.names.changes) as audit:
        if name is not None:
            audit.note_asked(name)
        context.keys.require_admin(request)
        if name is None:
            name = (await context.bodies.read(request, UnloadAdapterBody)).lora_name
            audit.note_asked(name)
        _require_enabled(context)
        if not name:
            raise AdapterError(
                "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name"
            )
        _note_before(audit, context, name)
        rollout = await context.names.unload(name, caller.shown)
        _note_serial(audit, rollout)
    await _remove_unused(context)
    return name, rollout


async def _paths(context: ServerContext) -> dict[str, str]:
    return {adapter.name: adapter.path for adapter in await context.engine.list_adapters()}


def _note_before(audit: AdapterAudit, context: ServerContext, name: str) -> None:
    adapter = context.engine.adapter(name)
    if adapter is not None:
        audit.note_before(adapter.digest, adapter.path)


def _note_serial(audit: AdapterAudit, rollout: Rollout | None) -> None:
    if rollout is not None:
        audit.note_serial(rollout.record.serial)


async def _published(context: ServerContext, wish: AdapterWish, by: str) -> Loaded:
    name = wish.lora_name
    try:
        return await context.names.load(wish, by)
    except HubNotAllowedError:
        raise
    except AdapterExistsError as error:
        raise AdapterExistsError(str(error), "lora_name") from error
    except AdapterNotFoundError as error:
        raise AdapterNotFoundError(f"Loading lora {name} failed: {error}", "lora_path") from error


def _require_enabled(context: ServerContext) -> None:
    if not context.engine.config.lora.enable_lora:
        raise AdapterError("LoRA is not enabled; start the server with --enable-lora")


def _check_name_and_path(context: ServerContext, name: str, path: str) -> None:
    if not (name and path):
        empty = "lora_path" if name else "lora_name"
        what = f"'{empty}'" if name or path else "Both 'lora_name' and 'lora_path'"
        raise AdapterError(f"{what} must be provided.", empty)
    context.models.check_adapter_name(name)
    if "\0" in path:
        raise AdapterError("lora_path must not contain a NUL character", "lora_path")
