"""Renders a conversation whose last message the model is to continue.

A template closes each message, so the last one gets a mark at its end, and the text is cut there.
"""

from __future__ import annotations

from lora_serve.chat.template_data import Message

_FIELD = "content"
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers has it: templates may strip its space


def mark_last(messages: list[Message], source: str) -> str:
    """Add the mark to the text of the last message; that text, as it was.

    Raises:
        ValueError: it has none, or the template reads none.
    """
    last = messages[-1]
    content = last.get(_FIELD)
    if content is None:
        raise ValueError("the final message has no content to continue")
    if _FIELD not in source:
        raise ValueError("the chat template reads no content that could be continued")
    if isinstance(content, str):
        last[_FIELD] = content + _MARK
        return content
    for part in reversed(content) if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _MARK
            return text
    raise ValueError("the final message has no text to continue")


def cut_at_mark(rendered: str, text: str) -> str:
    """The rendered conversation up to the end of `text`, which `mark_last` returned.

    Raises:
        ValueError: the template left one of both out.
    """
    mark = _MARK.strip()
    if text.strip() not in rendered or mark not in rendered:
        raise ValueError(
            "the final message does not stand in the conversation as the template writes it, so it "
            "cannot be continued"
        )
    end = rendered.rindex(mark)
    before = rendered[:end]
    return before if rendered.startswith(_MARK, end) else before.rstrip()
