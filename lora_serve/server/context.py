"""What all routes share: made once by `create_app`, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.config import ServerConfig
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.admin.adapter_spool import AdapterSpool
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.http.body import BodyReader
from lora_serve.server.http.drain import Drain
from lora_serve.server.openai.chat_formats import ChatFormats
from lora_serve.server.openai.inputs import Inputs
from lora_serve.server.openai.models import ServedModels
from lora_serve.server.openai.text_work import TextWork
from lora_serve.server.responses.store import StoredResponses


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What routes are made with.

    texts: where work on texts is done.
    chat_formats: how answers to chats are read. responses: those that are kept.
    adapter_bodies: reads bodies that hold adapters, whose files go to `spool`.
    names: what adapters' names stand for.
    chat_template: the text of --chat-template, or None for the tokenizer's own.
    """

    engine: Engine
    config: ServerConfig
    models: ServedModels
    keys: KeyRing
    drain: Drain
    bodies: BodyReader
    texts: TextWork
    inputs: Inputs
    chat_formats: ChatFormats
    responses: StoredResponses
    adapter_bodies: BodyReader
    spool: AdapterSpool
    names: AdapterNames
    chat_template: str | None = None

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The model's own sampling settings, unless --generation-config none."""
        if self.engine.config.model.generation_config == "none":
            return {}
        return self.engine.tokenizer.generation_defaults
