"""The body of /invocations: that of another route, told by its fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, RootModel, Tag

from lora_serve.server.http.body import UNION_TAGS
from lora_serve.server.openai.protocol import ChatBody, CompletionBody, EmbeddingBody

CHAT, COMPLETION, EMBEDDING = UNION_TAGS
TAGS = {
    "encoding_format": EMBEDDING,  # of messages, too
    "messages": CHAT,
    "prompt": COMPLETION,
    "prompt_embeds": COMPLETION,
    "input": EMBEDDING,
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
            | Annotated[EmbeddingBody, Tag(EMBEDDING)],
            Discriminator(
                tag_of,
                custom_error_type="invocation",
                custom_error_message=(
                    "must have messages (for a chat), prompt or prompt_embeds (for completions), "
                    "or input (for embeddings)"
                ),
            ),
        ]
    ]
):
    """POST /invocations."""
