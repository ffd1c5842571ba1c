"""The body of /invocations: that of another route, told by its fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, RootModel, Tag

from lora_serve.server.http.body import UNION_TAGS
from lora_serve.server.openai.protocol import ChatBody, CompletionBody, EmbeddingBody
from lora_serve.server.pooling.protocol import PoolingBody, RerankBody, ScoreBody

CHAT, COMPLETION, EMBEDDING, POOLING, SCORE, RERANK = UNION_TAGS
TAGS = {
    "task": POOLING,  # of messages, too, as the next
    "encoding_format": EMBEDDING,
    "messages": CHAT,
    "prompt": COMPLETION,
    "prompt_embeds": COMPLETION,
    "input": EMBEDDING,
    "query": RERANK,
    **dict.fromkeys(("queries", "text_1", "data_1"), SCORE),
}  # in the order in which they decide


def tag_of(body: object) -> str | None:
    """What a body asks for; None if it has none of the fields that tell."""
    if not isinstance(body, dict):
        return None
    return next((tag for name, tag in TAGS.items() if body.get(name) is not None), None)


class InvocationBody(
    RootModel[
        Annotated[
            Annotated[ChatBody, Tag(CHAT)]
            | Annotated[CompletionBody, Tag(COMPLETION)]
            | Annotated[EmbeddingBody, Tag(EMBEDDING)]
            | Annotated[PoolingBody, Tag(POOLING)]
            | Annotated[ScoreBody, Tag(SCORE)]
            | Annotated[RerankBody, Tag(RERANK)],
            Discriminator(
                tag_of,
                custom_error_type="invocation",
                custom_error_message=(
                    "must have messages (for a chat), prompt or prompt_embeds (for completions), "
                    "input (for embeddings), queries (for scores) or query (for a ranking)"
                ),
            ),
        ]
    ]
):
    """POST /invocations."""
