from __future__ import annotations

from lora_serve.text.tokenizer import Tokenizer


def test_bytes_of_all_tokens_put_together_are_the_text(
    byte_level: Tokenizer, sentence_piece: Tokenizer
) -> None:
    text = "hello 你好 𝄞 é\ufffd<tool call><|end|> \n"
    for tokenizer in (byte_level, sentence_piece):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        together = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
        assert together.decode().removeprefix(" ") == text


def test_every_single_byte_has_a_token_and_its_bytes(byte_level: Tokenizer) -> None:
    found = {byte_level.token_bytes(token_id) for token_id in range(byte_level.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= found


def test_the_text_of_a_part_of_a_character_is_a_replacement(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("𝄞")
    assert [byte_level.token_text(token_id) for token_id in token_ids] == ["\ufffd"] * 4
    assert [byte_level.token_bytes(token_id) for token_id in token_ids] == [
        bytes([byte]) for byte in "𝄞".encode()
    ]


def test_a_token_keeps_the_space_that_it_begins_with(
    byte_level: Tokenizer, sentence_piece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        token_ids = tokenizer.encode("a hello", add_special_tokens=False)
        texts = [tokenizer.token_text(token_id) for token_id in token_ids]
        assert "".join(texts).endswith("a hello")
        assert any(text.startswith(" h") for text in texts)


def test_special_and_added_tokens_have_their_text(byte_level: Tokenizer) -> None:
    for text in ("<|end|>", "<tool call>"):
        (token_id,) = byte_level.encode(text)
        assert byte_level.token_text(token_id) == text
        assert byte_level.token_bytes(token_id) == text.encode()
