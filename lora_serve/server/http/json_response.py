"""The one encoder of answers. Floats are written so that they read back to the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response


def encode(body: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    return msgspec.json.encode(body)


def json_response(
    body: msgspec.Struct | Sequence[msgspec.Struct], headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(body), headers=headers, media_type="application/json")
