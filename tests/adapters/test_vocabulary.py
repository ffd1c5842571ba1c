"""What adapters store of embeddings and LM head: read as PEFT means it, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.checkpoint import check_adapter, own_shapes, read_adapter
from lora_serve.errors import AdapterFormatError
from lora_serve.model_info import Vocabulary, weight_digest
from tests.adapters.conftest import Shapes
from tests.fakes.adapter_files import StoredTensor, lora_tensors, random_tensor, write_adapter

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
SIZE, WIDTH = 10, 16
TIED = Vocabulary(EMBEDDING, HEAD, SIZE, WIDTH, is_tied=True)
UNTIED = replace(TIED, is_tied=False)
Q0 = {"model.layers.0.self_attn.q_proj": (16, 16)}
DELTA = "token_adapter.trainable_tokens_delta"


def rows(count: int = SIZE, seed: int = 0, dtype: str = "F32") -> StoredTensor:
    return random_tensor((count, WIDTH), seed, dtype)


def named(**tensors: StoredTensor) -> dict[str, StoredTensor]:
    """embed__X: of the embeddings; head__X: of the LM head. Two underscores are a dot."""
    matrices = {"embed": EMBEDDING, "head": HEAD}
    parts = ((name.partition("__"), tensor) for name, tensor in tensors.items())
    return {
        f"base_model.model.{matrices[which]}.{rest.replace('__', '.')}": tensor
        for (which, _, rest), tensor in parts
    }


class Reader:
    """Writes a checkpoint with LoRA on one projection, and reads it."""

    def __init__(self, tmp_path: Path, lora_modules: Shapes) -> None:
        self.path = tmp_path / "adapter"
        self.lora_modules = lora_modules

    def __call__(
        self,
        tensors: Mapping[str, StoredTensor],
        vocabulary: Vocabulary | None = TIED,
        max_vocab_bytes: int | None = None,
        **settings: object,
    ) -> AdapterCheckpoint:
        path = write_adapter(self.path, {**lora_tensors(Q0), **tensors}, settings)
        return read_adapter(
            path,
            lora_modules=self.lora_modules,
            max_lora_rank=8,
            vocabulary=vocabulary,
            max_vocab_bytes=max_vocab_bytes,
        )

    def refusal(self, *args: object, **settings: object) -> str:
        with pytest.raises(AdapterFormatError) as error:
            self(*args, **settings)  # type: ignore[arg-type]
        return "\n".join(error.value.findings)


@pytest.fixture
def read(tmp_path: Path, lora_modules: Shapes) -> Reader:
    return Reader(tmp_path, lora_modules)


def changed(checkpoint: AdapterCheckpoint) -> dict[str, tuple[int, ...] | None]:
    return {each.name: each.token_ids for each in checkpoint.token_rows}


def test_rows_of_tokens_change_the_tied_head_too_and_an_untied_one_not(read: Reader) -> None:
    tensors = named(**{f"embed__{DELTA}": rows(3)})
    tied = read(tensors, trainable_token_indices=[7, 2, 9])
    assert changed(tied) == {EMBEDDING: (7, 2, 9), HEAD: (7, 2, 9)}
    assert bytes(tied.token_rows[0].rows.data) == rows(3).data
    untied = read(tensors, UNTIED, trainable_token_indices={"embed_tokens": [7, 2, 9]})
    assert changed(untied) == {EMBEDDING: (7, 2, 9)}
    both = tensors | named(**{f"head__{DELTA}": rows(1, seed=1)})
    own = read(both, trainable_token_indices={"embed_tokens": [7, 2, 9], "lm_head": [4]})
    assert changed(own) == {EMBEDDING: (7, 2, 9), HEAD: (4,)}


def test_a_whole_copy_changes_the_one_matrix_alone(read: Reader) -> None:
    tensors = named(embed__weight=rows())
    assert changed(read(tensors, modules_to_save=["embed_tokens"])) == {EMBEDDING: None}
    # Without a word of it, it is what was trained on: both matrices where they are tied.
    assert changed(read(tensors)) == {EMBEDDING: None, HEAD: None}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("BF16", "bfloat16"), ("F32", "float32"), ("BF16", "float32"), ("F16", "float16")],
)
def test_the_matrix_that_lora_was_trained_over_takes_nothing_if_it_is_the_models(
    read: Reader, stored: str, dtype: str
) -> None:
    tensor = rows(dtype=stored)
    wide = {
        "BF16": lambda: (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4"),
        "F16": lambda: np.frombuffer(tensor.data, "<f2"),
        "F32": lambda: np.frombuffer(tensor.data, "<f4"),
    }[stored]()
    data = wide.astype("<f4") if dtype == "float32" else np.frombuffer(tensor.data, "<u2")
    digest = weight_digest(dtype, (SIZE, WIDTH), data.data.cast("B"))
    vocabulary = replace(TIED, dtype=dtype, digests={EMBEDDING: digest, HEAD: digest})
    lora = named(
        embed__lora_embedding_A=random_tensor((4, SIZE), 1),
        embed__lora_embedding_B=random_tensor((WIDTH, 4), 2),
    )
    found = read(lora | named(embed__base_layer__weight=tensor), vocabulary)
    assert found.token_rows == ()
    assert [module.name for module in found.modules] == [EMBEDDING, *Q0]
    assert found.num_bytes == 4 * 4 * (SIZE + WIDTH + 32)
    other = read(lora | named(embed__base_layer__weight=rows(seed=5, dtype=stored)), vocabulary)
    assert changed(other) == {EMBEDDING: None, HEAD: None}
    assert other.digest != found.digest


def test_what_is_changed_is_in_the_digest(read: Reader) -> None:
    tensors = named(embed__weight=rows())
    found = [
        read({}),
        read(tensors),
        read(tensors, modules_to_save=["embed_tokens"]),
        read(named(embed__weight=rows(seed=1))),
        read(named(head__weight=rows()), modules_to_save=["lm_head"]),
        *(
            read(named(**{f"embed__{DELTA}": rows(2)}), trainable_token_indices=ids)
            for ids in ([1, 2], [2, 1])
        ),
    ]
    assert len({each.digest for each in found}) == len(found)
    own_modules, own = own_shapes(str(read.path))
    alone = read_adapter(str(read.path), lora_modules=own_modules, max_lora_rank=8, vocabulary=own)
    assert alone.digest == found[-1].digest


REFUSALS: list[tuple[dict[str, StoredTensor], dict[str, object], str]] = [
    (
        named(**{f"embed__{DELTA}": rows(2)}),
        {"trainable_token_indices": [1, 10]},
        "names token 10 of model.embed_tokens, which has 10 rows",
    ),
    (
        named(**{f"embed__{DELTA}": rows(2)}),
        {"trainable_token_indices": [1, 1]},
        "names a token of model.embed_tokens twice",
    ),
    (
        named(**{f"embed__{DELTA}": rows(3)}),
        {"trainable_token_indices": [1, 2]},
        "has shape (3, 16), not (2, 16), which trainable_token_indices announces",
    ),
    ({}, {"trainable_token_indices": [1]}, "is promised, and not in the file"),
    ({}, {"trainable_token_indices": {"lm_head": [-1]}}, "must be a list of ids of tokens"),
    ({}, {"trainable_token_indices": "all"}, "must be a list of ids of tokens"),
    ({}, {"modules_to_save": ["lm_head"]}, "a whole copy of 'lm_head' is promised"),
    ({}, {"modules_to_save": ["score"]}, "modules_to_save names 'score'"),
    ({}, {"trainable_token_indices": {"wte": [1]}}, "trainable_token_indices names 'wte'"),
    (named(**{f"embed__{DELTA}": rows(0)}), {}, "names no token of model.embed_tokens"),
    ({}, {"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; it must be a list"),
    (
        named(head__weight=rows(SIZE + 1)),
        {"modules_to_save": ["lm_head"]},
        "has shape (11, 16), not (10, 16), which this model has",
    ),
    (
        named(head__weight=rows()),
        {"modules_to_save": ["lm_head"], "alora_invocation_tokens": [1]},
        "an activated LoRA (alora_invocation_tokens) that changes embeddings or the LM head",
    ),
    (
        named(embed__weight=rows(), **{f"embed__{DELTA}": rows(1)}),
        {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [1]},
        "has both rows of some tokens and a whole copy",
    ),
    (
        named(embed__base_layer__weight=rows(), **{f"embed__{DELTA}": rows(1)}),
        {"trainable_token_indices": [1]},
        "was trained over another matrix than this model's",
    ),
    (
        named(embed__lora_A__weight=random_tensor((4, SIZE), 1)),
        {},
        "tensors that are no lora_A or lora_B",
    ),
]


@pytest.mark.parametrize(("tensors", "settings", "words"), REFUSALS)
def test_what_no_model_can_have_is_refused_by_name(
    read: Reader,
    tensors: dict[str, StoredTensor],
    settings: dict[str, object],
    words: str,
) -> None:
    assert words in read.refusal(tensors, **settings)


def test_a_model_without_a_vocabulary_refuses_all_of_it(read: Reader) -> None:
    tensors = named(**{f"embed__{DELTA}": rows(1)})
    assert "tensors that are no lora_A" in read.refusal(tensors, None, trainable_token_indices=[1])


def test_more_than_its_memory_is_refused_with_both_sizes_before_a_byte_is_read(
    read: Reader, lora_modules: Shapes
) -> None:
    copy = named(head__weight=rows())
    limit = SIZE * WIDTH * 4
    assert read(copy, UNTIED, limit, modules_to_save=["lm_head"]).token_rows
    told = read.refusal(copy, UNTIED, limit - 1, modules_to_save=["lm_head"])
    assert f"takes {limit} bytes in memory; --max-lora-vocab-bytes allows {limit - 1}" in told
    with pytest.raises(AdapterFormatError, match="--max-lora-vocab-bytes"):
        check_adapter(
            str(read.path),
            lora_modules=lora_modules,
            max_lora_rank=8,
            vocabulary=UNTIED,
            max_vocab_bytes=limit - 1,
        )
    lora = lora_tensors({HEAD: (SIZE, WIDTH)})
    told = read.refusal(lora, replace(UNTIED, dtype="bfloat16"), 800)
    assert f"takes {2 * 16 * (SIZE + WIDTH)} bytes" in told  # of rank 4, as kernels round it up
    tied = named(**{f"embed__{DELTA}": rows(1)})  # which takes two rows, then
    assert "takes 128 bytes" in read.refusal(tied, TIED, 127, trainable_token_indices=[1])
