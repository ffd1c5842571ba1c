"""Which paths' clients read another body of an error than OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from lora_serve.server.anthropic.errors import anthropic_shape
from lora_serve.server.anthropic.messages import MESSAGES_PATH
from lora_serve.server.http.errors import ErrorShape, Fault, error_detail

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def adapter_shape(fault: Fault, request_id: str) -> bytes:
    """OpenAI's, with its fields beside `error`, too: there vLLM had them, and controllers look."""
    detail = error_detail(fault)
    return json.dumps({"error": detail, "object": "error", **detail}).encode()


ERROR_SHAPES: Mapping[str, ErrorShape] = MappingProxyType(
    {
        MESSAGES_PATH: anthropic_shape,
        LOAD_PATH: adapter_shape,
        UNLOAD_PATH: adapter_shape,
    }
)
