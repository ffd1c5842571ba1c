"""Trains the demo's base model: a Qwen2 small enough to grow up in a minute.

Attention must learn to find a few words among thousands. Most of that it learns from short rows in
which tokens stand for crowds of equal ones, and only the rest from long rows: see `row_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import TRUNK, Kind, Row, RowShape, RowWriter

_SHORT_SHAPES = (RowShape(8, 32, 5), RowShape(8, 32, 5), RowShape(4, 128, 5))
_LONG_SHAPES = (RowShape(1, 600, 20), RowShape(1, 1200, 20), RowShape(1, 2400, 20))
_STEPS_PER_LONG_ONE = 10
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
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
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
    for step, shape in enumerate(step_shapes(recipe.seed, recipe.model_steps)):
        loss = row_loss(model, writer.rows(shape, [corpus.BASE_LABEL] * shape.num_rows))
        schedule.step(loss)
        if (step + 1) % 20 == 0:
            progress(
                f"training the model: step {step + 1}/{recipe.model_steps}, loss {loss.item():.3f}"
            )


def step_shapes(seed: int, num_steps: int) -> list[RowShape]:
    """The shape of each step's rows: short ones, and now and then a long one."""
    rng = Random(seed)
    shapes = []
    for step in range(1, num_steps + 1):
        is_long = step % _STEPS_PER_LONG_ONE == 0
        shapes.append(rng.choice(_LONG_SHAPES if is_long else _SHORT_SHAPES))
    return shapes


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
    """Cross entropy of answers, plus a little of that of other text. Rows are of one length.

    The two are averaged apart: in a long row the few words of an answer would not count.
    """
    token_ids = torch.tensor([row.token_ids for row in rows])
    kinds = torch.tensor([row.kinds for row in rows])[:, 1:]
    crowds = torch.tensor([row.crowds for row in rows])[:, :-1]
    branch_ids = torch.tensor([row.branch_ids for row in rows])[:, :-1]
    hidden = model.model(
        input_ids=token_ids[:, :-1],
        position_ids=torch.tensor([row.positions for row in rows])[:, :-1],
        attention_mask=row_mask(crowds, branch_ids),
        use_cache=False,
    ).last_hidden_state
    targets = token_ids[:, 1:]

    def mean_loss(kind: Kind) -> Tensor:
        wanted = kinds == kind
        return nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])

    return mean_loss(Kind.ANSWER) + _TEXT_SHARE * mean_loss(Kind.TEXT)


def row_mask(crowds: Tensor, branch_ids: Tensor) -> Tensor:
    """What to add to attention's scores, so that branches are apart and crowds weigh what they are.

    A key that stands for n equal ones weighs n times as much: + log n.

    Args:
        crowds: (rows, tokens), for how many equal tokens each stands.
        branch_ids: (rows, tokens), the branch of each, or TRUNK.

    Returns:
        (rows, 1, tokens, tokens), -inf where a token does not see another.
    """
    num_tokens = crowds.shape[1]
    past = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    same_branch = branch_ids[:, :, None] == branch_ids[:, None, :]
    seen = past & (same_branch | (branch_ids == TRUNK)[:, None, :])
    return torch.where(seen, crowds.log()[:, None, :], -torch.inf)[:, None]


def _learning_rate_factor(step: int, num_steps: int) -> float:
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / num_steps)))
