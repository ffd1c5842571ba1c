"""GET /docs: Swagger UI over /openapi.json, from this server alone.

The files hold nothing of this server. The document comes from /openapi.json, which asks for a key
where there are keys; the page asks its reader for it then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from lora_serve.server.api_page.files import PAGE_FILES, PageFile
from lora_serve.server.ui.router import HEADERS as PAGE_HEADERS

# Swagger UI writes styles into elements, and draws with pictures that its own files hold.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": POLICY}


def api_page_router() -> APIRouter:
    router = APIRouter()
    for file in PAGE_FILES:
        router.add_api_route(file.path, _answering(file))
    return router


def _answering(file: PageFile) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        # Read when it is asked for, which is seldom: Swagger UI has 1.7 MB.
        return Response(file.read(), media_type=file.media_type, headers=HEADERS)

    return answer
