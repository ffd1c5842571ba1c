"""GET /ui: the page, and the files that it is made of. They hold no datum of this server.

Every datum comes from other routes, which ask for the key that the page's reader gives it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from fastapi import APIRouter
from starlette.responses import Response

from lora_serve.server.ui.files import PAGE, UI_FILES, UI_PATH, UIFile

# The page may load nothing, run nothing and ask nothing but what this server gives; no text can
# become markup (Trusted Types), and no other page may show it in a frame.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a server of another version may follow at this address
}


@cache
def ui_router() -> APIRouter:
    """The page's router, one for all applications of a process."""
    router = APIRouter()
    router.add_api_route(UI_PATH, _answering(UIFile(PAGE)))
    for file in UI_FILES:
        router.add_api_route(file.path, _answering(file))
    return router


def _answering(file: UIFile) -> Callable[[], Awaitable[Response]]:
    content = file.read()

    async def answer() -> Response:
        return Response(content, media_type=file.media_type, headers=HEADERS)

    return answer
