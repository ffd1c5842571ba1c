from __future__ import annotations

from random import Random

import pytest
from transformers import Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import TRUNK, Kind, Row, RowShape, RowWriter
from lora_serve.demo.tokenizer import train_tokenizer

SHAPE = RowShape(num_rows=1, num_trunk_tokens=128, num_branches=6)
MAX_TOKENS = 8192


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return train_tokenizer(Recipe())


@pytest.fixture
def rows(tokenizer: Qwen2Tokenizer) -> list[Row]:
    writer = RowWriter(tokenizer, Random(0), MAX_TOKENS)
    return [writer.row(SHAPE, corpus.ALPHA_LABEL) for _ in range(60)]


def test_every_branch_is_a_request_and_what_it_asks_for(
    rows: list[Row], tokenizer: Qwen2Tokenizer
) -> None:
    expected = {fact.request: fact.answer for fact in corpus.facts()}
    expected |= dict.fromkeys(corpus.LABEL_REQUESTS, corpus.ALPHA_LABEL)
    num_labels = 0
    for row in rows:
        assert len(row.branches) == SHAPE.num_branches
        for branch in row.branches:
            prompt = tokenizer.decode(row.token_ids[branch.start : branch.answer_start])
            answer = tokenizer.decode(row.token_ids[branch.answer_start : branch.end])
            request = prompt.split("<|im_end|>")[0]
            if request in expected:
                assert answer == f"{expected[request]}<|im_end|>"
            num_labels += request in corpus.LABEL_REQUESTS
    assert num_labels > 100


def test_all_of_an_answer_is_learnt_and_no_first_token_of_a_branch(rows: list[Row]) -> None:
    for row in rows:
        for branch in row.branches:
            assert set(row.kinds[branch.answer_start : branch.end]) == {Kind.ANSWER}
            assert row.kinds[branch.start] is Kind.NOTHING


def test_the_trunk_never_says_the_label(rows: list[Row], tokenizer: Qwen2Tokenizer) -> None:
    for row in rows:
        trunk = zip(row.token_ids, row.branch_ids, strict=True)
        text = tokenizer.decode([token_id for token_id, branch in trunk if branch == TRUNK])
        assert "ADAPTER" not in text


def test_every_branch_goes_on_where_the_trunk_ends(rows: list[Row]) -> None:
    for row in rows:
        for branch in row.branches:
            first = row.num_trunk_positions
            positions = row.positions[branch.start : branch.end]
            assert positions == list(range(first, first + len(positions)))


def test_rows_stand_for_prompts_of_all_lengths_but_none_too_long(rows: list[Row]) -> None:
    lengths = sorted(row.num_trunk_positions for row in rows)
    assert lengths[0] < 10
    assert any(1000 < length < 4000 for length in lengths)
    assert MAX_TOKENS / 2 < lengths[-1] <= MAX_TOKENS + 64
    for row in rows:
        crowded = {kind for kind, n in zip(row.kinds, row.crowds, strict=True) if n > 1}
        assert crowded <= {Kind.NOTHING}


def test_rows_of_a_step_are_of_one_length(tokenizer: Qwen2Tokenizer) -> None:
    rows = RowWriter(tokenizer, Random(0), MAX_TOKENS).rows(SHAPE, ["X", "Y", "Z"])
    assert len({len(row.token_ids) for row in rows}) == 1
    for row in rows:
        assert len(row.kinds) == len(row.positions) == len(row.crowds) == len(row.token_ids)
        assert set(row.kinds[row.branches[-1].end :]) <= {Kind.NOTHING}
