"""torch's operations between the kernels, so that a row's bits depend on that row alone.

Modules of transformers compute with torch, whose kernels may give an element other bits in a
tensor of another size: the last elements of a vector loop, the split over threads and the blocks
of a product depend on it. Here each operation that torch runs is one of four kinds:

- exact: it moves values, compares them, or rounds once as IEEE 754 says (+ - * / sqrt). Its bits
  are the same in any vector lane.
- elementwise: a function such as exp. It is computed in blocks of one fixed size, which vectors
  fill to the end.
- reduction: a sum over a row, or what is built on one. It is computed in blocks of one fixed
  number of rows, or, where a trial shows that a row's place in the block changes its bits, row by
  row.
- product with a weight: the reference kernel's, which has the same rule.

Complex numbers, in which some rotate, are multiplied as pairs of real ones.

All others are refused by name, before weights are read: some would mix rows (cumulative sums,
products of activations), the others were not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.watched_operations import OperationWatch

BLOCK_ELEMENTS = 8192  # a multiple of any vector, and too few for torch to share among threads
BLOCK_ROWS = 16

_EXACT = frozenset(
    (
        # views, and where values go
        *("alias", "as_strided", "detach", "diagonal", "expand", "movedim", "permute", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold"),
        *("unsqueeze", "view", "_unsafe_view", "_reshape_alias", "lift_fresh"),
        *("_to_copy", "cat", "clone", "constant_pad_nd", "copy", "embedding", "flip", "gather"),
        *("index", "index_select", "masked_fill", "repeat", "roll", "scatter", "stack", "where"),
        *("tril", "triu", "view_as_complex", "view_as_real", "set"),
        # new values
        *("arange", "empty", "empty_like", "empty_strided", "fill", "full", "full_like"),
        *("new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like"),
        *("complex", "imag", "real", "scalar_tensor", "zero", "zeros", "zeros_like"),
        *("abs", "ceil", "clamp", "clamp_max", "clamp_min", "floor", "hardtanh", "maximum"),
        *("minimum", "neg", "relu", "round", "sign", "threshold", "trunc"),
        # comparisons
        *("all", "amax", "amin", "any", "argmax", "argmin", "bitwise_and", "bitwise_not"),
        *("bitwise_or", "eq", "ge", "gt", "isfinite", "isinf", "isnan", "le", "logical_and"),
        *("logical_not", "logical_or", "lt", "ne", "sort", "topk"),
    )
)
_ROUNDED = frozenset(("add", "div", "leaky_relu", "mul", "reciprocal", "rsub", "sqrt", "sub"))
_ELEMENTWISE = frozenset(
    (
        *("celu", "cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "hardsigmoid", "hardswish"),
        *("log", "log10", "log1p", "log2", "mish", "pow", "rsqrt", "sigmoid", "silu", "sin"),
        *("softplus", "tan", "tanh"),
    )
)
_NORMS = frozenset(("layer_norm", "rms_norm"))  # over their normalized_shape
_SOFTMAXES = frozenset(("_log_softmax", "_softmax", "log_softmax", "softmax"))
_SUMS = frozenset(("linalg_vector_norm", "logsumexp", "mean", "norm", "std", "sum", "var"))
_COMPARED = frozenset(("max", "min"))  # exact, but over all rows unless a dimension is named


class RowOperations(OperationWatch):
    """Runs torch's operations as the module says. It looks away from calls of our own kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._may_share: dict[Hashable, bool] = {}  # by kind of reduction

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        match _kind(func, args, kwargs):
            case Kind.EXACT:
                return func(*args, **kwargs)
            case Kind.ELEMENTWISE:
                return _elementwise(func, args, kwargs)
            case Kind.REDUCTION:
                return self._reduction(Reduction(func, args, kwargs))
            case Kind.PRODUCT:
                return _product(_plain_name(func), *args)
            case Kind.OUTER_PRODUCT:
                return args[0] * args[1]
            case Kind.COMPLEX_PRODUCT:
                return _complex_product(*args)
        result = self.run_parts(func, args, kwargs)
        assert result is not NotImplemented, f"{func} was not met before weights were read"
        return result

    def _reduction(self, reduction: Reduction) -> Tensor:
        rows = reduction.rows()
        width = rows.shape[1]
        key = (reduction.name, rows.dtype, width, torch.get_num_threads())
        may_share = self._may_share.get(key)
        if may_share is None:
            may_share = self._may_share[key] = _rows_may_share(reduction, width, rows.dtype)
        size = BLOCK_ROWS if may_share else 1
        return reduction.shaped(_in_blocks(rows, size, reduction.of_block))


class NotedOperations(OperationWatch):
    """Runs operations without weights or values (on torch's meta device), to see which there are.

    num_rows: that the model is run with. unknown: the names of operations that `RowOperations`
    would not run, and of those that number the rows by their places instead of their positions.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.unknown: list[str] = []

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = _plain_name(func)
        numbers_rows = name == "arange" and self._num_rows in args
        if _kind(func, args, kwargs) is not None and not numbers_rows:
            return func(*args, **kwargs)
        result = self.run_parts(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if name not in self.unknown:
            self.unknown.append(name)
        return func(*args, **kwargs)


class Kind(Enum):
    """How an operation is computed. OUTER_PRODUCT: each element is one product, which is exact."""

    EXACT = auto()
    ELEMENTWISE = auto()
    REDUCTION = auto()
    PRODUCT = auto()
    OUTER_PRODUCT = auto()
    COMPLEX_PRODUCT = auto()


def _kind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Kind | None:
    """The kind of a call; None: unknown, or made of others."""
    name = _plain_name(func)
    tensors = [each for each in args if isinstance(each, Tensor)]
    if name in _ROUNDED and any(each.is_complex() for each in tensors):
        is_product = name == "mul" and len(tensors) == 2 and not _is_in_place(func)
        return Kind.COMPLEX_PRODUCT if is_product else None
    kind = _KINDS.get(name)
    if kind is Kind.EXACT and kwargs.get("alpha", 1) != 1:
        return None
    if kind is Kind.ELEMENTWISE and sum(each.ndim > 0 for each in tensors) > 1:
        return None
    if kind is Kind.REDUCTION:
        return _kind_of_reduction(Reduction(func, args, kwargs))
    if name in _COMPARED and len(args) > 1:
        return Kind.EXACT
    if name == "bmm" and args[0].shape[-1] == 1:
        return Kind.OUTER_PRODUCT
    return kind


_KINDS = {
    **dict.fromkeys(_EXACT | _ROUNDED, Kind.EXACT),
    **dict.fromkeys(_ELEMENTWISE, Kind.ELEMENTWISE),
    **dict.fromkeys(_NORMS | _SOFTMAXES | _SUMS, Kind.REDUCTION),
    **dict.fromkeys(("addmm", "linear", "mm"), Kind.PRODUCT),
}


@functools.cache
def _plain_name(func: Any) -> str:
    """`mul` of aten::mul and of aten::mul_, which works in place."""
    name = str(func._schema.name).removeprefix("aten::")
    return name if name.startswith("__") else name.removesuffix("_")


def _is_in_place(func: Any) -> bool:
    return str(func._schema.name).endswith("_")


def _in_blocks(x: Tensor, size: int, of_block: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute x (N, …) by blocks of `size` of its N, the last one filled up with zeros.

    of_block: may write to what it gets.
    """
    short = -len(x) % size
    padded = pad(x, (*(0, 0) * (x.ndim - 1), 0, short)) if short else x
    # A block may lie anywhere, and what is alone where its block began: copies are aligned alike.
    parts = [of_block(block.clone()) for block in padded.split(size)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(x)]


# ── functions of one element ────────────────────────────────────────────────────────────────────


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Compute in blocks of BLOCK_ELEMENTS, so that no element is left to a loop of its own."""
    at = next(i for i, each in enumerate(args) if isinstance(each, Tensor))
    x: Tensor = args[at]

    def of_block(block: Tensor) -> Tensor:
        result: Tensor = func(*args[:at], block, *args[at + 1 :], **kwargs)
        return result

    result = _in_blocks(x.reshape(-1), BLOCK_ELEMENTS, of_block).view(x.shape)
    return x.copy_(result) if _is_in_place(func) else result


# ── functions of a row ──────────────────────────────────────────────────────────────────────────


class Reduction:
    """One call of a norm, softmax or sum, as a function of rows (N, D)."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.name = _plain_name(func)
        self._func = func
        names = [argument.name for argument in func._schema.arguments]
        self._named = {**dict(zip(names, args, strict=False)), **kwargs}
        self._x: Tensor = self._named.pop(names[0])
        self.dims = self._reduced_dims()

    @property
    def is_exact(self) -> bool:
        """Whether it sums whole numbers."""
        return not self._x.is_floating_point() and self._named.get("dtype") is None

    def _reduced_dims(self) -> list[int]:
        """Counted from the end; empty for all of them."""
        if self.name in _NORMS:
            return list(range(-len(self._named["normalized_shape"]), 0))
        dim = self._named.get("dim")
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        return sorted(each if each < 0 else each - self._x.ndim for each in dims)

    def rows(self) -> Tensor:
        """(N, D), where D are the dimensions that are reduced."""
        moved = self._moved()
        width = moved.shape[self._x.ndim - len(self.dims) :].numel()
        return moved.reshape(-1, width)

    def _moved(self) -> Tensor:
        return self._x.movedim(self.dims, list(range(-len(self.dims), 0)))

    def of_block(self, rows: Tensor) -> Tensor:
        """(N, D) -> (N, D), or (N, 1) of a sum."""
        named = dict(self._named)
        if self.name in _NORMS:
            named["normalized_shape"] = [rows.shape[1]]
            for each in ("weight", "bias"):
                if named.get(each) is not None:
                    named[each] = named[each].reshape(-1)
        elif self.name in _SOFTMAXES:
            named["dim"] = -1
        else:
            named |= {"dim": [-1], "keepdim": True}
        result: Tensor = self._func(rows, **named)
        return result

    def shaped(self, rows: Tensor) -> Tensor:
        """The result of all rows, in the shape that the call gives."""
        ends = list(range(-len(self.dims), 0))
        moved = self._moved().shape
        if self.name in _SUMS:
            ones = moved[: -len(self.dims)] + (1,) * len(self.dims)
            result = rows.view(ones).movedim(ends, self.dims)
            return result if self._named.get("keepdim") else result.squeeze(self.dims)
        return rows.view(moved).movedim(ends, self.dims)


def _kind_of_reduction(reduction: Reduction) -> Kind | None:
    if not reduction.dims:
        return None  # over all rows
    return Kind.EXACT if reduction.is_exact else Kind.REDUCTION


def _rows_may_share(reduction: Reduction, width: int, dtype: torch.dtype) -> bool:
    """Whether a row's bits do not depend on its place in a block, nor on the block's other rows.

    A fact of this machine, this torch and this width, tried on random numbers.
    """
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(BLOCK_ROWS, width, generator=generator).to(dtype)
    together = reduction.of_block(rows)
    for shift in (1, 6):
        if not torch.equal(reduction.of_block(rows.roll(shift, 0)).roll(-shift, 0), together):
            return False
    alone = torch.zeros_like(rows)
    alone[0] = rows[-1]
    return torch.equal(reduction.of_block(alone)[0], together[-1])


# ── products ────────────────────────────────────────────────────────────────────────────────────


def _product(name: str, *args: Any) -> Tensor:
    """Give x @ weight.T + bias by the reference kernel, for weights that are no linear layer's."""
    bias = None
    if name == "linear":
        x, weight, bias = (*args, None)[:3]
    elif name == "mm":
        x, weight = args[0], args[1].t()
    else:
        bias, x, weight = args[0], args[1], args[2].t()
    linears = REFERENCE.linears
    rows = linears.linear(x.reshape(-1, x.shape[-1]), linears.pack_linear(weight, bias))
    return rows.to(x.dtype).view(*x.shape[:-1], rows.shape[-1])


def _complex_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as formulas have it: loops over vectors may leave out roundings."""
    a, b = (
        each if each.is_complex() else torch.complex(each, torch.zeros_like(each))
        for each in (a, b)
    )
    real = a.real * b.real - a.imag * b.imag
    return torch.complex(real, a.real * b.imag + a.imag * b.real)


def sample_bits() -> str:
    """Digest of what torch's functions and sums give here, which differs between processors."""
    x = torch.randn(BLOCK_ROWS, 1000, generator=torch.Generator().manual_seed(0))
    with RowOperations():
        parts = (x.exp(), x.cos(), x.sigmoid(), x.mean(-1), x.softmax(-1))
    bits = b"".join(part.contiguous().view(torch.int32).numpy().tobytes() for part in parts)
    return xxhash.xxh3_64_hexdigest(bits)
