"""Rows of the table of routes: what SageMaker asks."""

from __future__ import annotations

from lora_serve.server.openai.answers import ChatCompletion, Completion, EmbeddingList
from lora_serve.server.operation import Access, Operation
from lora_serve.server.pooling.answers import PooledList, Ranking, ScoreList
from lora_serve.server.sagemaker.protocol import InvocationBody

OPERATIONS = (
    Operation(
        method="post",
        path="/invocations",
        summary="A chat, completions, embeddings or scores, as SageMaker asks for them",
        access=Access.KEY,
        answer=(Completion, ChatCompletion, EmbeddingList, PooledList, ScoreList, Ranking),
        body=InvocationBody,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
)
