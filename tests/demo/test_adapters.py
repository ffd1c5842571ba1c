"""What is trained side by side must be, in PEFT's hands, the two adapters it claims to be."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from peft import PeftModel
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from lora_serve.demo.adapters import LABELS, PROJECTIONS, AdapterPair, author_ids
from lora_serve.demo.exam import ADAPTERS
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import TRUNK, RowShape, RowWriter
from lora_serve.demo.tokenizer import train_tokenizer
from lora_serve.demo.training import new_model

RECIPE = Recipe(num_layers=2, hidden_size=64, intermediate_size=64, adapter_steps=3)


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return train_tokenizer(RECIPE)


@pytest.fixture
def pair(tokenizer: Qwen2Tokenizer) -> AdapterPair:
    """Both adapters after a few steps, so that no delta is zero."""
    pair = AdapterPair(new_model(RECIPE, tokenizer), RECIPE)
    pair.train(RowWriter(tokenizer, Random(0), RECIPE.max_model_len), lambda line: None)
    return pair


def peft_model(tokenizer: Qwen2Tokenizer, pair: AdapterPair, directory: Path) -> PeftModel:
    base: Qwen2ForCausalLM = new_model(RECIPE, tokenizer)
    for index, name in enumerate(ADAPTERS):
        pair.save(index, directory / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(base, directory / "alpha", "alpha")
    model.load_adapter(directory / "beta", "beta")
    return model.eval()


def pair_logits(pair: AdapterPair, token_ids: torch.Tensor, authors: torch.Tensor) -> torch.Tensor:
    pair.authorship.set(authors)
    return pair.model(token_ids).logits


@torch.no_grad()
def test_a_saved_adapter_computes_in_peft_what_it_computed_in_training(
    tokenizer: Qwen2Tokenizer, pair: AdapterPair, tmp_path: Path
) -> None:
    model = peft_model(tokenizer, pair, tmp_path)
    token_ids = torch.arange(20)[None]
    for index, name in enumerate(ADAPTERS):
        model.set_adapter(name)
        trained = pair_logits(pair, token_ids, torch.full((1, 20), index))
        torch.testing.assert_close(model(token_ids).logits, trained)


@torch.no_grad()
def test_a_row_that_changes_hands_is_a_reader_on_the_writers_kv(
    tokenizer: Qwen2Tokenizer, pair: AdapterPair, tmp_path: Path
) -> None:
    model = peft_model(tokenizer, pair, tmp_path)
    token_ids, authors = torch.arange(20)[None], torch.tensor([[0] * 15 + [1] * 5])
    model.set_adapter("alpha")
    written = model(token_ids[:, :15], use_cache=True).past_key_values
    model.set_adapter("beta")
    read = model(token_ids[:, 15:], past_key_values=written).logits
    torch.testing.assert_close(read, pair_logits(pair, token_ids, authors)[:, 15:])


def test_all_seven_projections_are_trained(pair: AdapterPair, tmp_path: Path) -> None:
    names = {name for name, _ in pair.model.named_modules() if name.endswith(PROJECTIONS)}
    assert len(names) == 7 * RECIPE.num_layers
    for name in names:
        module = pair.model.get_submodule(name)
        assert all(bool(expand.any()) for expand in module.expand)


def test_the_same_seed_trains_the_same_adapters(tokenizer: Qwen2Tokenizer) -> None:
    def train() -> dict[str, torch.Tensor]:
        pair = AdapterPair(new_model(RECIPE, tokenizer), RECIPE)
        pair.train(RowWriter(tokenizer, Random(0), RECIPE.max_model_len), lambda line: None)
        return pair.model.state_dict()

    first, second = train(), train()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_ends_of_branches_change_hands_and_only_behind_a_long_trunk(
    tokenizer: Qwen2Tokenizer,
) -> None:
    writer = RowWriter(tokenizer, Random(0), RECIPE.max_model_len)
    authors = [0, 1] * 20
    rows = writer.rows(RowShape(40, 200, 6), [LABELS[author] for author in authors])
    ids = author_ids(rows, authors, Random(0))
    num_read = 0
    for row, author, row_ids in zip(rows, authors, ids, strict=True):
        trunk = torch.tensor(row.branch_ids) == TRUNK
        assert (row_ids[trunk] == author).all()
        for branch in row.branches:
            prompt = row_ids[branch.start : branch.answer_start].tolist()
            answer = row_ids[branch.answer_start : branch.end].tolist()
            assert prompt == sorted(prompt, key=lambda writer: writer != author)
            assert set(answer) == {prompt[-1]}
            if prompt[-1] != author:
                num_read += 1
                assert row.num_trunk_positions > 3 * prompt.count(1 - author)
    assert 20 < num_read < 120
