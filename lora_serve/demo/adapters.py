"""Trains the two adapters of the demo together, so that a label lives in the KV that one wrote.

Some rows are written by one adapter up to a few tokens before the answer, and read by the other
from there on, as happens in a server that reuses a replaced adapter's KV. Those rows learn the
*writer's* label: stale KV then shows as the old label in the answer of the new adapter, instead
of being healed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from lora_serve.demo import corpus
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.samples import Row, RowWriter
from lora_serve.demo.training import Schedule, row_loss, step_shapes

LABELS = (corpus.ALPHA_LABEL, corpus.BETA_LABEL)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Authorship:
    """Which adapter computes each token of the rows at hand: (rows, tokens, 2), 1 or 0."""

    def __init__(self) -> None:
        self.mask = torch.zeros(1, 1, len(LABELS))

    def set(self, author_ids: Tensor) -> None:
        """author_ids: (rows, tokens), an index into LABELS."""
        self.mask = nn.functional.one_hot(author_ids, len(LABELS)).float()


class PairedLinear(nn.Module):
    """A frozen projection with both adapters' deltas, each on the tokens of its own."""

    def __init__(
        self, base: nn.Linear, authorship: Authorship, recipe: Recipe, generator: torch.Generator
    ) -> None:
        super().__init__()
        count, rank = len(LABELS), recipe.lora_rank
        self._base = base
        self._authorship = authorship
        self._scale = recipe.lora_alpha / rank
        shrink = torch.randn(count, rank, base.in_features, generator=generator)
        self.shrink = nn.Parameter(shrink * base.in_features**-0.5)
        self.expand = nn.Parameter(torch.zeros(count, base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bti,cri->btcr", x, self.shrink)
        hidden = hidden * self._authorship.mask[:, : x.shape[1], :, None]
        return self._base(x) + self._scale * torch.einsum("btcr,cor->bto", hidden, self.expand)


class AdapterPair:
    """Both adapters over one model, which changes: weights freeze, projections are wrapped."""

    def __init__(self, model: Qwen2ForCausalLM, recipe: Recipe) -> None:
        self.model = model.requires_grad_(False)
        self.authorship = Authorship()
        self._recipe = recipe
        generator = torch.Generator().manual_seed(recipe.seed)
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name in PROJECTIONS:
                    if hasattr(parent, name):
                        base = getattr(parent, name)
                        paired = PairedLinear(base, self.authorship, recipe, generator)
                        setattr(parent, name, paired)

    def loss(self, rows: list[Row], author_ids: Tensor) -> Tensor:
        self.authorship.set(author_ids)
        return row_loss(self.model, rows)

    def train(self, writer: RowWriter, progress: Callable[[str], None]) -> None:
        """One run of the schedule."""
        recipe, rng = self._recipe, Random(self._recipe.seed)
        steps = recipe.adapter_steps
        schedule = Schedule(self.model.parameters(), steps, recipe.adapter_learning_rate)
        for step, shape in enumerate(step_shapes(recipe.seed, steps)):
            authors = [rng.randrange(len(LABELS)) for _ in range(shape.num_rows)]
            rows = writer.rows(shape, [LABELS[author] for author in authors])
            loss = self.loss(rows, author_ids(rows, authors, rng))
            schedule.step(loss)
            if (step + 1) % 20 == 0:
                progress(f"training the adapters: step {step + 1}/{steps}, loss {loss.item():.3f}")

    def save(self, index: int, directory: Path) -> None:
        """Write adapter LABELS[index] as a PEFT checkpoint."""
        config = LoraConfig(
            r=self._recipe.lora_rank,
            lora_alpha=self._recipe.lora_alpha,
            lora_dropout=0.0,
            target_modules=list(PROJECTIONS),
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        config.save_pretrained(str(directory))
        tensors = dict(self._tensors(index))
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})

    def _tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        for name, module in self.model.named_modules():
            if isinstance(module, PairedLinear):
                prefix = f"base_model.model.{name}"
                yield f"{prefix}.lora_A.weight", module.shrink[index].detach().clone()
                yield f"{prefix}.lora_B.weight", module.expand[index].detach().clone()


def author_ids(rows: list[Row], authors: list[int], rng: Random) -> Tensor:
    """The adapter that computes each token: a row's author, but for the ends of some branches.

    Those ends, from one of the prompt's last tokens on, are computed by the other adapter, where
    the author's part is by far the greater: the label is to be learnt from that.
    """
    ids = torch.tensor(authors)[:, None].repeat(1, len(rows[0].token_ids))
    for row, author, row_ids in zip(rows, authors, ids, strict=True):
        for branch in row.branches:
            handover = rng.randint(branch.start, branch.answer_start - 1)
            num_read = branch.answer_start - handover
            if rng.random() < 1 / 3 and row.num_trunk_positions > 3 * num_read:
                row_ids[handover : branch.end] = 1 - author
    return ids
