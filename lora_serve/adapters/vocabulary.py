"""What an adapter stores of the embeddings and the LM head: rows that take the place of theirs.

PEFT writes them in three ways. Rows of some tokens (`trainable_token_indices`) change a tied LM
head, too. A whole copy (`modules_to_save`) changes the one matrix alone, tied or not. And beside
LoRA on such a matrix it writes the matrix itself: usually what the model has anyway, which then
takes no memory; else it stands in the model's place, in both where they are tied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from lora_serve.adapter_checkpoint import RawTensor, TokenRows
from lora_serve.adapters.findings import listed, shown
from lora_serve.adapters.peft_config import LoRASettings
from lora_serve.adapters.tensor_file import TensorSpec
from lora_serve.model_info import Vocabulary, weight_digest

EMBEDDING_NAME, HEAD_NAME = "embed_tokens", "lm_head"  # the last parts of such matrices' names
UNKNOWN_SIZE = 2**31  # of a vocabulary, where only some of its rows are seen
_RANK_STEP = 16  # kernels round ranks up to it

_ROWS_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+?)"
    r"(\.token_adapter\.trainable_tokens_delta|(?:\.token_adapter)?\.base_layer\.weight|\.weight)",
    re.DOTALL,
)
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class RowsKind(Enum):
    """How PEFT came to store rows. The values are in digests."""

    TOKENS = "rows of some tokens"
    COPY = "a whole copy"
    BASE = "the matrix that it was trained on"


@dataclass(frozen=True, slots=True)
class RowsInFile:
    """One tensor of rows. token_ids: as of TokenRows, in the order of the rows."""

    matrix: str
    tensor: str
    kind: RowsKind
    token_ids: tuple[int, ...] | None

    def matrices_changed(
        self, found: Sequence[RowsInFile], vocabulary: Vocabulary
    ) -> tuple[str, ...]:
        """The matrix; and the tied one, if PEFT changes it with it and it has nothing of its own.

        found: all in the file.
        """
        pair = (vocabulary.embedding, vocabulary.head)
        other = pair[self.matrix == pair[0]]
        reaches = self.kind is RowsKind.BASE or (
            self.kind is RowsKind.TOKENS and self.matrix == vocabulary.embedding
        )
        own_kinds = {each.kind for each in found if each.matrix == other}
        if vocabulary.is_tied and reaches and not own_kinds & {self.kind, RowsKind.COPY}:
            return (self.matrix, other)
        return (self.matrix,)


def find_rows(
    specs: Mapping[str, TensorSpec],
    settings: LoRASettings,
    vocabulary: Vocabulary | None,
    findings: list[str],
) -> tuple[RowsInFile, ...]:
    """The tensors of rows by what the header and the config say; what is wrong is appended."""
    if vocabulary is None:
        promised = {
            "modules_to_save": settings.modules_to_save,
            "trainable_token_indices": settings.trainable_tokens,
        }
        findings += [
            f"{name} is set, and no adapter may change this model's embeddings or LM head"
            for name, value in promised.items()
            if value
        ]
        return ()
    found: list[RowsInFile] = []
    for name, spec in sorted(specs.items()):
        rows = _parsed(name, settings, vocabulary)
        if rows is None:
            continue
        if any(other.matrix == rows.matrix and other.kind == rows.kind for other in found):
            findings.append(f"{rows.kind.value} of {rows.matrix} stands there twice")
        found.append(rows)
        _check_rows(rows, spec, vocabulary, findings)
    _check_settings(found, settings, vocabulary, findings)
    return tuple(found)


def _parsed(name: str, settings: LoRASettings, vocabulary: Vocabulary) -> RowsInFile | None:
    match = _ROWS_NAME.fullmatch(name)
    if match is None or match[1] not in (vocabulary.embedding, vocabulary.head):
        return None
    matrix = match[1]
    if match[2].endswith("trainable_tokens_delta"):
        return RowsInFile(matrix, name, RowsKind.TOKENS, _token_ids(matrix, settings, vocabulary))
    is_copy = match[2] == ".weight" and any(
        _means(saved, matrix) for saved in settings.modules_to_save
    )
    return RowsInFile(matrix, name, RowsKind.COPY if is_copy else RowsKind.BASE, None)


def _token_ids(matrix: str, settings: LoRASettings, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The tokens that the config names for a matrix; a list without a name is the embeddings'."""
    for name, token_ids in settings.trainable_tokens:
        if _means(name or vocabulary.embedding, matrix):
            return token_ids
    return ()


def _means(name: str, matrix: str) -> bool:
    """Whether PEFT takes a name of a config for the module of that name."""
    return name == matrix or matrix.endswith(f".{name}")


def _check_rows(
    rows: RowsInFile, spec: TensorSpec, vocabulary: Vocabulary, findings: list[str]
) -> None:
    name, token_ids = rows.tensor, rows.token_ids
    count = vocabulary.size if token_ids is None else len(token_ids)
    if spec.shape != (count, vocabulary.hidden_size):
        findings.append(
            f"{shown(name)} has shape {spec.shape}, not {(count, vocabulary.hidden_size)}, which "
            + ("this model has" if token_ids is None else "trainable_token_indices announces")
        )
    if token_ids is None:
        return
    if not token_ids:
        findings.append(f"trainable_token_indices names no token of {rows.matrix}")
    if len(set(token_ids)) < len(token_ids):
        findings.append(f"trainable_token_indices names a token of {rows.matrix} twice")
    if max(token_ids, default=0) >= vocabulary.size:
        findings.append(
            f"trainable_token_indices names token {max(token_ids)} of {rows.matrix}, which has "
            f"{vocabulary.size} rows"
        )


def _check_settings(
    found: Sequence[RowsInFile],
    settings: LoRASettings,
    vocabulary: Vocabulary,
    findings: list[str],
) -> None:
    """What the config promises must be there, and nothing that PEFT itself cannot combine."""
    matrices = (vocabulary.embedding, vocabulary.head)
    tokens_of = [name or vocabulary.embedding for name, _ in settings.trainable_tokens]
    for setting, kind, names in (
        ("modules_to_save", RowsKind.COPY, settings.modules_to_save),
        ("trainable_token_indices", RowsKind.TOKENS, tokens_of),
    ):
        unserved = [name for name in names if not any(_means(name, m) for m in matrices)]
        if unserved:
            findings.append(
                f"{setting} names {listed(unserved)}; only {' and '.join(matrices)} can be "
                "changed so, all other modules are the same for all requests"
            )
        there = [rows.matrix for rows in found if rows.kind is kind]
        follows = vocabulary.is_tied and kind is RowsKind.TOKENS and vocabulary.embedding in there
        missing = [
            m
            for m in matrices
            if any(_means(n, m) for n in names)
            and m not in there
            and not (m == vocabulary.head and follows)
        ]
        if missing:
            findings.append(f"{kind.value} of {listed(missing)} is promised, and not in the file")
    for matrix in matrices:
        kinds = {rows.kind for rows in found if rows.matrix == matrix}
        if {RowsKind.TOKENS, RowsKind.COPY} <= kinds:
            findings.append(f"{matrix} has both rows of some tokens and a whole copy; keep one")
    if found and settings.invocation_tokens:
        findings.append(
            "an activated LoRA (alora_invocation_tokens) that changes embeddings or the LM head "
            "is not served: they would act before the invocation tokens, too; retrain without"
        )


def read_rows(
    found: Sequence[RowsInFile],
    tensors: Mapping[str, RawTensor],
    vocabulary: Vocabulary | None,
    findings: list[str],
) -> tuple[TokenRows, ...]:
    """What stands in the place of the model's rows, without what is equal to them."""
    if vocabulary is None:
        return ()
    changed = [
        rows
        for rows in found
        if rows.token_ids is not None
        or not _is_the_models(rows.matrix, tensors[rows.tensor], vocabulary)
    ]
    kept: dict[str, TokenRows] = {}
    for rows in changed:
        for matrix in rows.matrices_changed(found, vocabulary):
            if matrix in kept:
                findings.append(
                    f"{matrix} was trained over another matrix than this model's, and rows of it "
                    "were changed, too; only one of both can be served: merge the adapter"
                )
            kept[matrix] = TokenRows(matrix, rows.token_ids, tensors[rows.tensor])
    return tuple(kept[matrix] for matrix in sorted(kept))


def _is_the_models(matrix: str, tensor: RawTensor, vocabulary: Vocabulary) -> bool:
    digest = vocabulary.digests.get(matrix)
    values = None if digest is None else _in_dtype(tensor, vocabulary.dtype)
    return values is not None and weight_digest(vocabulary.dtype, tensor.shape, values) == digest


def _in_dtype(tensor: RawTensor, dtype: str) -> memoryview | None:
    """The numbers' bytes in another type; None where that would round one of them."""
    if _DTYPE_NAMES[tensor.dtype] == dtype:
        return tensor.data
    if tensor.dtype == "F32" and dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u4")
        return None if (bits & 0xFFFF).any() else (bits >> 16).astype("<u2").data.cast("B")
    if tensor.dtype == "BF16" and dtype == "float32":
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).data.cast("B")
    if "bfloat16" in (dtype, _DTYPE_NAMES[tensor.dtype]):
        return None
    wide = np.frombuffer(tensor.data, "<f4" if tensor.dtype == "F32" else "<f2")
    with np.errstate(over="ignore"):
        cast = wide.astype("<f4" if dtype == "float32" else "<f2")
    return cast.data.cast("B") if bool((cast == wide).all()) else None


_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def surely_kept(found: Iterable[RowsInFile]) -> list[RowsInFile]:
    """The rows that take memory, whatever reading them shows."""
    return [rows for rows in found if rows.kind is not RowsKind.BASE]


def check_vocabulary_bytes(
    ranks: Mapping[str, int],
    rows: Iterable[RowsInFile | TokenRows],
    vocabulary: Vocabulary | None,
    most_bytes: int | None,
    findings: list[str],
) -> None:
    """Append a finding where an adapter brings more for the vocabulary than it may.

    ranks: of the modules by name. rows: those that are kept.
    """
    if vocabulary is None or most_bytes is None:
        return
    size, hidden_size = vocabulary.size, vocabulary.hidden_size
    num_values = sum(
        -(-ranks[matrix] // _RANK_STEP) * _RANK_STEP * (size + hidden_size)
        for matrix in (vocabulary.embedding, vocabulary.head)
        if matrix in ranks
    )
    for each in rows:
        num_values += (size if each.token_ids is None else len(each.token_ids)) * hidden_size
    num_bytes = num_values * _ITEM_BYTES[vocabulary.dtype]
    if num_bytes > most_bytes:
        findings.append(
            f"what it changes of {vocabulary.embedding} and {vocabulary.head} takes {num_bytes} "
            f"bytes in memory; --max-lora-vocab-bytes allows {most_bytes}: raise it, or merge the "
            "adapter into its model"
        )


def own_vocabulary(specs: Mapping[str, TensorSpec]) -> Vocabulary | None:
    """A vocabulary that the tensors fit, as their names and shapes say; None where none is seen."""
    names = {EMBEDDING_NAME: "", HEAD_NAME: ""}
    sizes, widths = [], []
    for name, spec in specs.items():
        stem = name.removeprefix("base_model.model.")
        match = re.fullmatch(r"((?:.+\.)?(embed_tokens|lm_head))\.(.+)", stem, re.DOTALL)
        if match is None or len(spec.shape) != 2:
            continue
        names[match[2]] = match[1]
        first, second = spec.shape
        match match[3]:
            case "lora_embedding_A":
                sizes.append(second)
            case "lora_B.weight":
                sizes.append(first)
            case "lora_embedding_B":
                widths.append(first)
            case "lora_A.weight":
                widths.append(second)
            case "weight" | "base_layer.weight":
                sizes.append(first)
                widths.append(second)
            case _:
                widths.append(second)
    if not widths:
        return None
    embedding = names[EMBEDDING_NAME] or f"model.{EMBEDDING_NAME}"
    size = sizes[0] if sizes else UNKNOWN_SIZE
    return Vocabulary(embedding, names[HEAD_NAME] or HEAD_NAME, size, widths[0], is_tied=False)
