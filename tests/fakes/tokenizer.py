"""A tokenizer without files: a token is a byte of UTF-8, or one of a few special ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.errors import InvalidRequestError

BOS, EOS, TURN = 256, 257, 258
SPECIAL = {BOS: "<bos>", EOS: "<eos>", TURN: "<turn>"}
VOCAB_SIZE = 260
TURN_TEXT = "\ue000"  # what encodes to TURN


class ByteTokenizer:
    """Writes chats as <turn>role\\ncontent, and knows OpenAI's four roles."""

    def __init__(self, generation_defaults: Mapping[str, float] | None = None) -> None:
        self.generation_defaults = dict(generation_defaults or {})
        self.eos_token_ids = {EOS}
        self.special_token_ids = frozenset(SPECIAL)
        self.vocab_size = VOCAB_SIZE
        self.max_token_chars = max(map(len, SPECIAL.values()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        first, *others = text.split(TURN_TEXT)
        token_ids = [BOS] * add_special_tokens + list(first.encode())
        for other in others:
            token_ids += [TURN, *other.encode()]
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        data = b""
        for token_id in token_ids:
            if token_id not in SPECIAL or not skip_special_tokens:
                data += self.token_bytes(token_id)
        return data.decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        max_chars: int | None = None,
        trusts_template: bool = True,
    ) -> str:
        text = chat_template or ""
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise InvalidRequestError(f"unexpected role {message['role']!r}", "messages")
            text += f"{TURN_TEXT}{message['role']}\n{message['content']}"
            if message.keys() & {"reasoning_content", "tool_calls"}:
                text += f"{message.get('reasoning_content')}{message.get('tool_calls')}"
        if add_generation_prompt:
            text += f"{TURN_TEXT}assistant\n"
        return text

    tokenizer_class = "ByteTokenizer"
    chat_template: str | None = None

    def special_token(self, purpose: str) -> str | None:
        return {"bos": SPECIAL[BOS], "eos": SPECIAL[EOS]}.get(purpose)

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        return {token_id: (text, True) for token_id, text in SPECIAL.items()}

    def token_piece(self, token_id: int) -> str:
        return f"<{token_id}>"

    def template_source(self, chat_template: str | None = None) -> str:
        return chat_template or self.chat_template or ""

    def special_token_id(self, text: str) -> int | None:
        return next((token_id for token_id, known in SPECIAL.items() if known == text), None)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return SPECIAL.get(token_id, "").encode()
