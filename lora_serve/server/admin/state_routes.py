"""Rows of the table of routes: whether the server is well, for orchestrators and operators."""

from __future__ import annotations

from lora_serve.server.admin.answers import Load, Version, Welcome
from lora_serve.server.http.auth import METRICS_PATH
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
from lora_serve.server.operation import PLAIN_TEXT, Access, Operation

OPERATIONS = (
    Operation(
        method="get",
        path="/",
        summary="Where to go on",
        access=Access.OPEN,
        answer=Welcome,
    ),
    *(
        Operation(method="get", path=path, summary=summary, access=Access.OPEN, answer=None)
        for paths, summary in (
            (READY_PATHS, "Whether requests are being answered"),
            (LIVE_PATHS, "Whether the server runs"),
        )
        for path in paths
    ),
    Operation(method="post", path="/ping", summary="The same", access=Access.OPEN, answer=None),
    Operation(
        method="get",
        path="/load",
        summary="How many requests are being answered",
        access=Access.KEY,
        answer=Load,
    ),
    Operation(
        method="get",
        path="/version",
        summary="Of this server",
        access=Access.OPEN,
        answer=Version,
    ),
    Operation(
        method="get",
        path=METRICS_PATH,
        summary="For Prometheus",
        access=Access.OPERATOR,
        answer=PLAIN_TEXT,
    ),
)
