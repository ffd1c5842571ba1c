"""Trains the demo's base model: a Qwen2 small enough to grow up in a minute.

All rows are short. What attention must learn for long prompts, to find a few words among thousands
far away, it learns from tokens that stand for crowds of equal ones: see `crowd_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import Kind, Row, RowWriter

_SHAPES = ((32, 32), (32, 32), (32, 32), (16, 64), (4, 256))  # (rows, tokens): 1,024 tokens
_TEXT_SHARE = 0.1
_WARMUP_STEPS = 10


def new_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """An untrained model in float32, its weights drawn from the recipe's seed."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_model_len,
        tie_word_embeddings=True,
        initializer_range=recipe.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return Qwen2ForCausalLM(config)


def train_model(
    model: Qwen2ForCausalLM,
    writer: RowWriter,
    recipe: Recipe,
    progress: Callable[[str], None],
) -> None:
    """One run of the schedule, in place."""
    schedule = Schedule(model.parameters(), recipe.model_steps, recipe.model_learning_rate)
    for step, (num_rows, num_tokens) in enumerate(step_shapes(recipe.seed, recipe.model_steps)):
        rows = [writer.model_row(num_tokens) for _ in range(num_rows)]
        loss = row_loss(model, rows)
        schedule.step(loss)
        if (step + 1) % 20 == 0:
            progress(
                f"training the model: step {step + 1}/{recipe.model_steps}, loss {loss.item():.3f}"
            )


def step_shapes(seed: int, num_steps: int) -> list[tuple[int, int]]:
    """(rows, tokens) of each step."""
    rng = Random(seed)
    return [rng.choice(_SHAPES) for _ in range(num_steps)]


class Schedule:
    """AdamW with a short warm-up and a cosine down to a tenth of the learning rate."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], num_steps: int, learning_rate: float
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: _learning_rate_factor(step, num_steps)
        )

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._scheduler.step()


def row_loss(model: Qwen2ForCausalLM, rows: list[Row]) -> Tensor:
    """Cross entropy of answers, plus a little of that of the other text. Rows are of one length.

    The two are averaged apart: in a long row the few words of an answer would not count.
    """
    token_ids = torch.tensor([row.token_ids for row in rows])
    kinds = torch.tensor([row.kinds for row in rows])[:, 1:]
    crowds = torch.tensor([row.crowds for row in rows])[:, :-1]
    hidden = model.model(
        input_ids=token_ids[:, :-1],
        position_ids=crowds.cumsum(dim=1) - crowds,
        attention_mask=crowd_mask(crowds),
        use_cache=False,
    ).last_hidden_state
    targets = token_ids[:, 1:]

    def mean_loss(kind: Kind) -> Tensor:
        wanted = kinds == kind
        return nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])

    return mean_loss(Kind.ANSWER) + _TEXT_SHARE * mean_loss(Kind.TEXT)


def crowd_mask(crowds: Tensor) -> Tensor | None:
    """What to add to attention's scores: a key seen n times weighs n times as much, or + log n.

    Args:
        crowds: (rows, tokens), for how many equal tokens each stands.

    Returns:
        (rows, 1, tokens, tokens), causal; None where every token stands for itself.
    """
    if bool((crowds == 1).all()):
        return None
    num_tokens = crowds.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    return crowds.log()[:, None, None, :].masked_fill(future, -torch.inf)


def _learning_rate_factor(step: int, num_steps: int) -> float:
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / num_steps)))
