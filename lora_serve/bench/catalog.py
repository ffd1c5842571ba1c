"""Lists what a server serves: its models, and the adapters that name one as their parent."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from lora_serve.bench.http_stream import HttpFault, Origin, request
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Catalog:
    models: tuple[str, ...]
    adapters: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_models(origin: Origin, api_key: str | None = None) -> Catalog:
    """Ask GET /v1/models. Raises ConfigError unless it answers with at least one model."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = f"{origin.scheme}://{origin.host}:{origin.port}{origin.prefix}/v1/models"
    try:
        async with request(origin, "GET", "/v1/models", headers) as response:
            body = await response.read()
            if response.status != 200:
                raise ConfigError(f"{where}: HTTP {response.status}: {body[:200].decode()}")
        found = msgspec.json.decode(body, type=_Models).data
    except (OSError, HttpFault, msgspec.DecodeError) as error:
        raise ConfigError(f"{where}: no list of models ({error}); is a server there?") from error
    models = tuple(model.id for model in found if model.parent is None)
    if not models:
        raise ConfigError(f"{where}: lists no model; name one with --served-model")
    return Catalog(models, tuple(model.id for model in found if model.parent is not None))
