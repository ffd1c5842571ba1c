"""Rows of the table of routes: the page for browsers."""

from __future__ import annotations

from lora_serve.server.operation import Access, Operation
from lora_serve.server.ui.files import UI_FILES, UI_PATH

OPERATIONS = (
    Operation(
        method="get",
        path=UI_PATH,
        summary="The page for browsers",
        access=Access.OPEN,
        answer="text/html",
    ),
    *(
        Operation(
            method="get",
            path=file.path,
            summary="A file of the page",
            access=Access.OPEN,
            answer=file.media_type,
        )
        for file in UI_FILES
    ),
)
