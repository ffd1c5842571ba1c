"""What the choice of a replica needs of a request: its adapter, its prompt's beginning, its tenant.

Whatever cannot be read is left out: the replica that gets the request says what is wrong with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
from starlette.datastructures import Headers

from lora_serve.errors import AdapterNotFoundError
from lora_serve.fleet.prefixes import CHUNK_BYTES, MAX_CHUNKS, prefix_hashes
from lora_serve.fleet.routing import RoutingRequest
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.server.openai.models import ServedModels
from lora_serve.server.sagemaker.invocations import ADAPTER_HEADER

MAX_READ_BYTES = 4 * 2**20  # a larger body goes to the replica with the least to do
MAX_NAME_CHARS = 1024
MAX_PREFIX_BYTES = CHUNK_BYTES * MAX_CHUNKS


class _Body(msgspec.Struct):
    """The fields of all routes that name an adapter, or begin what the model reads, in order."""

    model: msgspec.Raw = msgspec.Raw()
    lora_path: msgspec.Raw = msgspec.Raw()  # SGLang's name of it
    cache_salt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()

    def prefix(self) -> bytes:
        """What the model reads, as the client wrote it: equal prompts of one client are equal."""
        fields = (
            self.tools,
            self.system,
            self.instructions,
            self.messages,
            self.prompt,
            self.input,
            self.text,
            self.token_ids,
            self.input_ids,
        )
        parts = [bytes(memoryview(field)[:MAX_PREFIX_BYTES]) for field in fields]
        return b"".join(parts)[:MAX_PREFIX_BYTES]


_BODIES = msgspec.json.Decoder(_Body)
_NOTHING = _Body()


class ReadRequest(msgspec.Struct, frozen=True):
    """previous_response: a response that one replica has kept, whose conversation goes on."""

    routing: RoutingRequest
    previous_response: str = ""


class RequestReader:
    """Reads requests for the server that these names are of."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def read(self, headers: Sequence[tuple[bytes, bytes]], body: bytes, tenant: str) -> ReadRequest:
        """What is known of a request.

        Args:
            tenant: names who may share KV, the same for every request of theirs.
        """
        found = _NOTHING
        if 0 < len(body) <= MAX_READ_BYTES:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                found = _BODIES.decode(body)
        named = Headers(raw=[*headers]).get(ADAPTER_HEADER) or _text(found.model)
        salt = _text(found.cache_salt)
        return ReadRequest(
            RoutingRequest(
                lora_name=self._lora_name(named or _text(found.lora_path)),
                tenant=f"{tenant}/{salt}" if salt else tenant,
                prefix_hashes=prefix_hashes(found.prefix()),
            ),
            _text(found.previous_response_id),
        )

    def _lora_name(self, model: str) -> str | NoAdapter:
        try:
            return self._models.resolve(model or None).lora_name
        except AdapterNotFoundError:
            return BASE_MODEL


def _text(raw: msgspec.Raw) -> str:
    """The field if it is a text of no more than a name's length, else ""."""
    if not 0 < len(memoryview(raw)) <= MAX_NAME_CHARS:
        return ""
    try:
        return str(msgspec.json.decode(raw, type=str))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
