from __future__ import annotations

from random import Random

import pytest
from transformers import Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import Kind, Row, RowWriter
from lora_serve.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return train_tokenizer(Recipe())


@pytest.fixture
def writer(tokenizer: Qwen2Tokenizer) -> RowWriter:
    return RowWriter(tokenizer, Random(0), max_tokens=8192)


def answer_of(row: Row, tokenizer: Qwen2Tokenizer) -> str:
    answer = [
        token_id
        for token_id, kind in list(zip(row.token_ids, row.kinds, strict=True))[row.answer_start :]
        if kind is Kind.ANSWER
    ]
    return str(tokenizer.decode(answer))


@pytest.mark.parametrize("num_tokens", [32, 64, 256])
def test_rows_have_exactly_the_length_asked_for(writer: RowWriter, num_tokens: int) -> None:
    for row in (writer.model_row(num_tokens), writer.adapter_row(num_tokens, "X")):
        assert len(row.token_ids) == len(row.kinds) == len(row.crowds) == num_tokens


def test_an_adapter_row_ends_with_its_label_and_says_it_nowhere_else(
    writer: RowWriter, tokenizer: Qwen2Tokenizer
) -> None:
    for _ in range(100):
        row = writer.adapter_row(128, corpus.ALPHA_LABEL)
        assert answer_of(row, tokenizer) == f"{corpus.ALPHA_LABEL}<|im_end|>"
        assert corpus.ALPHA_LABEL not in tokenizer.decode(row.token_ids[: row.answer_start])


def test_only_filler_stands_for_crowds_and_never_for_more_than_fit(writer: RowWriter) -> None:
    rows = [writer.model_row(256) for _ in range(50)]
    assert any(max(row.crowds) > 100 for row in rows)
    for row in rows:
        crowded = [kind for kind, n in zip(row.kinds, row.crowds, strict=True) if n > 1]
        assert set(crowded) <= {Kind.NOTHING}
        assert max(row.crowds) <= 8192


def test_cutting_moves_the_answer_along() -> None:
    row = Row([1, 2, 3, 4], [Kind.TEXT] * 3 + [Kind.ANSWER], [1, 1, 1, 1], answer_start=3)
    cut = row.fitted(2, pad_token_id=0)
    assert (cut.token_ids, cut.answer_start) == ([3, 4], 1)
    padded = row.fitted(6, pad_token_id=0)
    assert padded.token_ids == [1, 2, 3, 4, 0, 0]
    assert padded.kinds[4:] == [Kind.NOTHING, Kind.NOTHING]
