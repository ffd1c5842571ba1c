"""Rows of the table of routes: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.server.anthropic.answers import AnthropicErrorAnswer, AnthropicMessage, TokenCount
from lora_serve.server.anthropic.protocol import CountTokensBody, MessagesBody
from lora_serve.server.operation import Access, Operation

MESSAGES_EXAMPLE: Mapping[str, object] = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": "Hello"}],
}
OPERATIONS = (
    Operation(
        method="post",
        path="/v1/messages",
        summary="Continue a conversation, as Anthropic's clients ask for it",
        access=Access.KEY,
        answer=AnthropicMessage,
        body=MessagesBody,
        example={**MESSAGES_EXAMPLE, "max_tokens": 16},
        error=AnthropicErrorAnswer,
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of such a conversation",
        access=Access.KEY,
        answer=TokenCount,
        body=CountTokensBody,
        example=MESSAGES_EXAMPLE,
        error=AnthropicErrorAnswer,
        names_model=True,
    ),
)
