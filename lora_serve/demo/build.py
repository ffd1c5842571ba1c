"""Builds the demo's model and two adapters: tokenizer, model, adapters, exam.

If what a seed gave fails the exam (rounding differs between machines), the next seed is tried.
Artefacts that failed are never left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from lora_serve.demo.adapters import AdapterPair
from lora_serve.demo.exam import ADAPTERS, Examiner
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import RowWriter
from lora_serve.demo.tokenizer import train_tokenizer
from lora_serve.demo.training import new_model, train_model


class TrainingFailedError(RuntimeError):
    """No seed gave a model that answers as the demo needs; lists what each got wrong."""


def build_demo(recipe: Recipe, directory: Path, progress: Callable[[str], None]) -> None:
    """Fill `directory` with model/, adapters/alpha and adapters/beta."""
    logging.disable_progress_bar()
    failures = []
    for seed in range(recipe.seed, recipe.seed + recipe.max_attempts):
        train(replace(recipe, seed=seed), directory, progress)
        progress("examining the model and its adapters")
        findings = Examiner(directory).findings()
        if not findings:
            return
        failures.append(f"seed {seed}: {'; '.join(findings)}")
        progress(f"training again with another seed: {findings[0]}")
    raise TrainingFailedError("\n".join(failures))


def train(recipe: Recipe, directory: Path, progress: Callable[[str], None]) -> None:
    """Train everything and save it in bfloat16, adapters against the rounded model."""
    tokenizer = train_tokenizer(recipe)
    model = new_model(recipe, tokenizer)
    train_model(model, _row_writer(recipe, tokenizer), recipe, progress)
    model.bfloat16()
    _save_model(model, tokenizer, directory / "model")
    pair = AdapterPair(model.float(), recipe)
    pair.train(_row_writer(recipe, tokenizer), progress)
    for index, name in enumerate(ADAPTERS):
        pair.save(index, directory / "adapters" / name)


def _row_writer(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> RowWriter:
    return RowWriter(tokenizer, Random(recipe.seed), recipe.max_model_len)


def _save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
