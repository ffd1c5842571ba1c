"""A tokenizer without files: a token is a byte of UTF-8, or one of a few special ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_serve.errors import InvalidRequestError

BOS, EOS, TURN = 256, 257, 258
SPECIAL = {BOS: "<bos>", EOS: "<eos>", TURN: "<turn>"}
VOCAB_SIZE = 260


class ByteTokenizer:
    """Writes chats as <turn>role\\ncontent, and knows no role but system, user and assistant."""

    def __init__(self, generation_defaults: Mapping[str, float] | None = None) -> None:
        self.generation_defaults = dict(generation_defaults or {})
        self.eos_token_ids = {EOS}
        self.special_token_ids = frozenset(SPECIAL)
        self.vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        data = b""
        for token_id in token_ids:
            if token_id not in SPECIAL or not skip_special_tokens:
                data += self.token_bytes(token_id)
        return data.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        token_ids = list((chat_template or "").encode())
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise InvalidRequestError(f"unexpected role {message['role']!r}", "messages")
            token_ids += [TURN, *f"{message['role']}\n{message['content']}".encode()]
        if add_generation_prompt:
            token_ids += [TURN, *b"assistant\n"]
        return token_ids

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return SPECIAL.get(token_id, "").encode()
