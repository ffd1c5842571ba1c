"""Rows of the table of routes: responses, and those that were kept."""

from __future__ import annotations

from lora_serve.server.operation import Access, Operation, QueryParameter
from lora_serve.server.responses.answers import DeletedResponse, InputItemList, Response
from lora_serve.server.responses.protocol import ResponseBody

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/responses",
        summary="Continue a conversation, of which the server may keep the earlier part",
        access=Access.KEY,
        answer=Response,
        body=ResponseBody,
        example={"input": "Hello", "max_output_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A response that was kept, or runs in the background",
        access=Access.KEY,
        answer=Response,
        names_response=True,
        in_query=(QueryParameter("stream"),),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget it",
        access=Access.KEY,
        answer=DeletedResponse,
        names_response=True,
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="End it, if it runs in the background",
        access=Access.KEY,
        answer=Response,
        names_response=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="The conversation that it continues",
        access=Access.KEY,
        answer=InputItemList,
        names_response=True,
        in_query=(
            QueryParameter("limit"),
            QueryParameter("order", ("asc", "desc")),
            QueryParameter("after"),
        ),
    ),
)
