"""Rows of the table of routes: what SGLang's clients ask."""

from __future__ import annotations

from lora_serve.server.operation import Access, Operation
from lora_serve.server.sglang.answers import SglangGenerated
from lora_serve.server.sglang.protocol import SglangGenerateBody

OPERATIONS = (
    Operation(
        method="post",
        path="/generate",
        summary="Continue texts or token ids, as SGLang's clients ask for it",
        access=Access.KEY,
        answer=SglangGenerated,
        body=SglangGenerateBody,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        generates=True,
        streams=True,
        names_model=True,
        or_list=True,
    ),
)
