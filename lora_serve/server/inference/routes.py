"""Rows of the table of routes: token ids in, token ids out."""

from __future__ import annotations

from lora_serve.server.inference.answers import Generated
from lora_serve.server.inference.protocol import GenerateBody
from lora_serve.server.operation import Access, Operation

OPERATIONS = (
    Operation(
        method="post",
        path="/inference/v1/generate",
        summary="Continue token ids by token ids",
        access=Access.KEY,
        answer=Generated,
        body=GenerateBody,
        example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}},
        generates=True,
        streams=True,
        names_model=True,
    ),
)
