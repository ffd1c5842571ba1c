"""Where in a prompt an adapter begins to act."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.errors import ASK_FOR_BASE_MODEL, InvalidRequestError
from lora_serve.prompts import EmbedsPrompt, Prompt, last_occurrence


def adapter_start(lora_name: str, invocation_tokens: Sequence[int], prompt: Prompt) -> int:
    """The position of the first token that the adapter acts on.

    Args:
        invocation_tokens: of the adapter, as `AdapterCheckpoint` has them. An activated LoRA acts
            from where they last begin, as in PEFT; where PEFT would let the base model answer
            without a word, the request is refused.

    Raises:
        InvalidRequestError: the prompt does not hold them.
    """
    if not invocation_tokens:
        return 0
    start = last_occurrence(prompt, invocation_tokens)
    if start is None:
        held = (
            "a prompt of embeddings alone holds no tokens; send"
            if isinstance(prompt, EmbedsPrompt)
            else "the prompt does not hold them; put"
        )
        raise InvalidRequestError(
            f"prompt: the lora adapter '{lora_name}' begins to act at its invocation tokens "
            f"{list(invocation_tokens)}, and {held} them where it is to begin. "
            f"{ASK_FOR_BASE_MODEL} to have no adapter act.",
            "prompt",
        )
    return start
