"""Rows of the table of routes: the page at /docs."""

from __future__ import annotations

from lora_serve.server.api_page.files import DOCS_PATH, PAGE_FILES
from lora_serve.server.operation import Access, Operation

OPERATIONS = tuple(
    Operation(
        method="get",
        path=file.path,
        summary="This API for readers" if file.path == DOCS_PATH else "A file of the page /docs",
        access=Access.OPEN,
        answer=file.media_type,
    )
    for file in PAGE_FILES
)
