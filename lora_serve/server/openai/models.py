"""Which names are served, and how each is shown.

A base model's names are known here; which adapters there are only the engine knows, so an unknown
name is handed to it as an adapter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.catalog.rollout import State
from lora_serve.config import EngineConfig
from lora_serve.errors import ASK_FOR_BASE_MODEL, AdapterError, AdapterNotFoundError
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.messages import AdapterInfo
from lora_serve.server.adapter_names.base import AdapterNames, NotServed
from lora_serve.server.admin.query import Query
from lora_serve.server.admin.rollouts import with_rollouts
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.openai.answers import ModelCard, ModelList

SHORT_HEX = 12
MAX_LORA_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """What a request's `model` names. lora_name: of an adapter, or BASE_MODEL; base: its name."""

    shown: str
    lora_name: str | NoAdapter
    base: str


class ServedModels:
    """The base model's names, of which the first is its own."""

    def __init__(self, config: EngineConfig) -> None:
        self.names = config.model.served_model_name or (config.model.model,)
        self._enable_lora = config.lora.enable_lora

    def resolve(self, model: str | None) -> ModelTarget:
        """A base name, an adapter's name, or "base:adapter"; the base model if left out.

        Raises:
            AdapterNotFoundError: surely unknown. The engine may still not know the adapter.
        """
        if model is None:
            return ModelTarget(self.names[0], BASE_MODEL, self.names[0])
        if model in self.names:
            return ModelTarget(model, BASE_MODEL, model)
        lora_name = model
        for name in self.names:
            if model.startswith(f"{name}:"):
                lora_name = model.removeprefix(f"{name}:")
        if not (lora_name and self._enable_lora):
            raise self.unknown(model)
        return ModelTarget(model, lora_name, self.names[0])

    def is_taken(self, lora_name: str) -> bool:
        """Whether a request for this name would get the base model."""
        return any(lora_name == name or lora_name.startswith(f"{name}:") for name in self.names)

    def check_adapter_name(self, name: str) -> None:
        """Raise AdapterError for a name under which no adapter can be served here."""
        if not name:
            raise AdapterError("'lora_name' must be provided.", "lora_name")
        if self.is_taken(name):
            raise AdapterError(
                f"The lora adapter '{name}' conflicts with a served base model.", "lora_name"
            )
        if len(name) > MAX_LORA_NAME_CHARS or not name.isprintable():
            raise AdapterError(
                f"lora_name must have at most {MAX_LORA_NAME_CHARS} characters, all of them "
                f"printable, got {len(name)} beginning {name[:20]!r}",
                "lora_name",
            )

    def unknown(self, model: str, adapters: Sequence[str] = ()) -> AdapterNotFoundError:
        """The error for a name that none of these has."""
        known = [*self.names, *adapters]
        remedy = "" if self._enable_lora else " Adapters need a server with --enable-lora."
        return AdapterNotFoundError.of_model(model, known, remedy)


def as_asked_for(error: AdapterNotFoundError, target: ModelTarget) -> AdapterNotFoundError:
    """The engine's error, with the name that the body has, and with the base model's.

    The engine knows neither: the body's may begin with the base model's, which users choose.
    """
    told = str(error).replace(f"`{target.lora_name}`", f"`{target.shown}`", 1)
    before, ask_for, after = told.rpartition(ASK_FOR_BASE_MODEL)
    named = f"{before}{ask_for} `{target.base}`{after}" if ask_for else told
    return AdapterNotFoundError(named, "model")


def system_fingerprint(model_fingerprint: bytes, adapter: AdapterRef | NoAdapter | None) -> str:
    """Which weights answered: the model's, and the adapter's version; "" if none did."""
    if adapter is None:
        return ""
    model = model_fingerprint.hex()[:SHORT_HEX]
    if adapter is BASE_MODEL:
        return model
    return f"{model}-{adapter.digest.hex()[:SHORT_HEX]}-g{adapter.generation}"


async def require_model(engine: Engine, models: ServedModels, model: str | None) -> None:
    """Raise AdapterNotFoundError unless `model` is served, on routes that run no model."""
    target = models.resolve(model)
    if target.lora_name is BASE_MODEL:
        return
    if engine.adapter(target.lora_name) is None:
        adapters = [adapter.name for adapter in await engine.list_adapters()]
        raise models.unknown(target.shown, adapters)


def models_router(
    engine: Engine, models: ServedModels, started_at: int, names: AdapterNames
) -> APIRouter:
    """Routes under /v1/models.

    started_at: seconds since 1970, shown as the base model's `created`.
    """
    router = APIRouter()

    async def cards(request: Request) -> list[ModelCard]:
        """One for each name; where things lie on this machine is for those who may change it."""
        cards = [_base_card(engine, name, started_at) for name in models.names]
        if engine.config.lora.enable_lora:
            adapters = await engine.list_adapters()
            cards += [_adapter_card(engine, models.names[0], adapter) for adapter in adapters]
        if caller_of(request).is_admin:
            return cards
        return [_for_users(card) for card in cards]

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """List what this server has; for admins with ?not_served=true what it lacks, too.

        Not without it: gateways send requests to where a name is listed.
        """
        is_whole = Query(request, *request.query_params).flag("not_served", default=False)
        served = await cards(request)
        if names.is_shared and caller_of(request).is_admin:
            lacking = names.not_served() if is_whole else ()
            served += (_not_served_card(engine, models, one) for one in lacking)
            served = await with_rollouts(names, served)
        return json_response(ModelList(data=served))

    @router.get("/v1/models/{model:path}")
    async def show_model(request: Request, model: str) -> Response:
        lora_name = models.resolve(model).lora_name
        card_id = model if lora_name is BASE_MODEL else lora_name
        served, is_admin = await cards(request), caller_of(request).is_admin
        card = next((one for one in served if one.id == card_id), None)
        if card is None:
            lacking = _lacking(names, card_id, is_admin)
            if lacking is None:
                raise models.unknown(model, [one.id for one in served[len(models.names) :]])
            card = _not_served_card(engine, models, lacking)
        if names.is_shared and is_admin:
            (card,) = await with_rollouts(names, [card], is_whole=True)
        return json_response(card)

    return router


def _lacking(names: AdapterNames, name: str, is_admin: bool) -> NotServed | None:
    """The name, if the catalog has it and this server has not; others than admins get an error.

    Raises:
        LoraServeError: what a request for it is told.
    """
    lacking = next((one for one in names.not_served() if one.record.name == name), None)
    if lacking is not None and not is_admin:
        raise lacking.refusal
    return lacking


def _for_users(card: ModelCard) -> ModelCard:
    """Leave out how much others use an adapter; show the name where `root` is no hub id."""
    is_place = card.root.startswith(("/", "~", ".")) or "://" in card.root
    root = card.id if is_place else card.root
    return msgspec.structs.replace(card, root=root, residency=UNSET, num_leases=UNSET)


def _base_card(engine: Engine, name: str, started_at: int) -> ModelCard:
    return ModelCard(
        id=name,
        created=started_at,
        root=engine.config.model.model,
        max_model_len=engine.model_info.max_model_len,
        weights=engine.model_info.weights or UNSET,
        quantization=engine.config.model.quantizes_to or UNSET,
    )


def _not_served_card(engine: Engine, models: ServedModels, lacking: NotServed) -> ModelCard:
    record, failure = lacking.record, lacking.failure
    return ModelCard(
        id=record.name,
        created=int(record.time),
        root=record.source,
        parent=models.names[0],
        max_model_len=engine.model_info.max_model_len,
        digest=record.digest,
        generation=record.generation,
        pinned=record.pinned,
        state=(State.LOADING if failure is None else State.FAILED).value,
        detail=UNSET if failure is None else failure.reason,
    )


def _adapter_card(engine: Engine, parent: str, adapter: AdapterInfo) -> ModelCard:
    return ModelCard(
        id=adapter.name,
        created=int(adapter.created),
        root=adapter.path,
        parent=parent,
        max_model_len=engine.model_info.max_model_len,
        digest=adapter.digest,
        generation=adapter.generation,
        rank=adapter.rank,
        residency=adapter.residency,
        pinned=adapter.pinned,
        num_leases=adapter.num_leases,
        num_bytes=adapter.num_bytes,
        alora_invocation_tokens=adapter.invocation_tokens or UNSET,
    )
