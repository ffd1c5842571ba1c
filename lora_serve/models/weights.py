"""Where weights come from: a checkpoint in a directory, or seeded random numbers.

A model's tensors are read one at a time, so that no second copy of the model is ever in memory, and
copied out of the file, so that a file that changes later changes nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from lora_serve.config.model import RANDOM_WEIGHTS
from lora_serve.errors import ConfigError
from lora_serve.identity import framed
from lora_serve.model_info import weight_digest
from lora_serve.models.base import ModelSpec
from lora_serve.models.checkpoints.base import (
    FLOATS,
    CheckpointFormat,
    StoredTensor,
    refuse_all,
)
from lora_serve.models.checkpoints.choose import format_of
from lora_serve.models.finite import is_finite
from lora_serve.models.readahead import FileRange, ReadAhead
from lora_serve.ops.quantization import QuantizedWeight

_CPU = torch.device("cpu")
_BUFFER = ".rotary_emb.inv_freq"  # old checkpoints hold it; it is computed here
_AT_ONCE = 2**18  # bytes that are compared, which a core's cache holds
_RANDOM_POOL = 1_048_583  # values; a prime, so that no two rows of a weight are alike


class TensorSource(Protocol):
    """The tensors of one model, by the names of `ModelSpec.tensor_shapes`."""

    @property
    def described(self) -> str:
        """The format and the types in it, for people."""

    @property
    def is_quantised(self) -> bool:
        """Whether some weights are stored as other than floats."""

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        """A tensor of any float dtype, which the caller may keep and change.

        wanted: as StoredTensors.read has it.
        """

    def read_codes(self, name: str) -> QuantizedWeight | None:
        """A matrix as the codes that it is stored as, where kernels could take them; else None."""

    def will_read(self, names: Iterable[str]) -> None:
        """Tensors that will be read, about in this order."""

    def files(self) -> frozenset[Path] | None:
        """The files that say what the tensors are; None if that is not known, or there are none."""


class Checkpoint:
    """The tensors that a checkpoint stores, by the names of `ModelSpec.tensor_shapes`.

    form: the format of the directory. name_of: as ModelSpec.tensor_name.

    Raises:
        ConfigError: when there are none, or a file is missing or broken.
    """

    def __init__(
        self, directory: Path, form: CheckpointFormat, name_of: Callable[[str], str | None]
    ) -> None:
        self._directory = directory
        self._format = form.name
        self._dtypes = form.dtypes
        self._source = form.open(directory)
        self._configs = () if directory.is_file() else tuple(directory.glob("*.json"))
        tensors = self._source.tensors()
        self._stored = {
            name: (stored, tensor)
            for stored, tensor in tensors.items()
            if (name := name_of(stored)) is not None and not stored.endswith(_BUFFER)
        }
        self._not_read = {each: tensors[each] for each in tensors if name_of(each) is None}
        self._read_ahead = ReadAhead(())

    @property
    def described(self) -> str:
        return f"{self._format} ({', '.join(sorted({t.dtype for _, t in self._stored.values()}))})"

    @property
    def is_quantised(self) -> bool:
        return any(tensor.dtype not in FLOATS for _, tensor in self._stored.values())

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a checkpoint that does not hold exactly `shapes`, naming what differs."""
        found = self._stored.keys()
        findings = [f"{name} is missing" for name in shapes if name not in found]
        findings += [f"{name} is unexpected" for name in sorted(found - shapes.keys())]
        findings += [
            finding
            for name in shapes
            if name in found and (finding := self._check_tensor(name, shapes[name]))
        ]
        refuse_all(self._directory, findings)

    def check_tied(self, tied_to: Callable[[str], str | None], dtype: torch.dtype) -> None:
        """Refuse tensors that are tied to others and are not equal to them.

        tied_to: as ModelSpec.tied_to. dtype: of the model.
        """
        findings = [
            f"{stored} differs from {name}, though tie_word_embeddings says that both are one; set "
            "it to false in config.json to use both, or take the tensor out of the checkpoint"
            for stored, tensor in self._not_read.items()
            if (name := tied_to(stored)) is not None
            and not self._are_equal((stored, tensor), self._stored[name], dtype)
        ]
        refuse_all(self._directory, findings)

    def will_read(self, names: Iterable[str]) -> None:
        self._read_ahead = ReadAhead([r for name in names for r in self._stored[name][1].ranges])

    def files(self) -> frozenset[Path] | None:
        ranges = [tensor.ranges for _, tensor in self._stored.values()]
        if not all(ranges):
            return None
        return frozenset({*(each.path for some in ranges for each in some), *self._configs})

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        stored, tensor = self._stored[name]
        read = self._source.read(stored, wanted)
        self._note_read(tensor)
        return read

    def read_codes(self, name: str) -> QuantizedWeight | None:
        stored, tensor = self._stored[name]
        codes = self._source.read_codes(stored)
        if codes is not None:
            self._note_read(tensor)
        return codes

    def _are_equal(
        self, one: tuple[str, StoredTensor], other: tuple[str, StoredTensor], dtype: torch.dtype
    ) -> bool:
        """Whether two tensors are, by their bytes where both are floats of one type."""
        tensors = [tensor for _, tensor in (one, other)]
        if len({tensor.shape for tensor in tensors}) > 1:
            return False
        kinds, ranges = {tensor.dtype for tensor in tensors}, [each.ranges for each in tensors]
        if len(kinds) == 1 and kinds < {*FLOATS} and all(len(each) == 1 for each in ranges):
            return _same_bytes(*(each for (each,) in ranges))
        first, second = (self._source.read(name, dtype).to(dtype) for name, _ in (one, other))
        return torch.equal(first, second)

    def _note_read(self, tensor: StoredTensor) -> None:
        self._read_ahead.note_read(sum(r.end - r.begin for r in tensor.ranges))

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> str:
        _, stored = self._stored[name]
        if stored.shape != shape:
            return f"{name} has shape {stored.shape}, the config says {shape}"
        if not stored.is_readable:
            return f"{name} is stored as {stored.dtype}; supported are {', '.join(self._dtypes)}"
        return ""


class RandomWeights:
    """Weights for a model that has only a config: one pool of normal numbers, repeated.

    Scaled by 1 / sqrt(in_features); norms are 1. Equal for equal seeds, and made on the device.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        self._shapes = shapes
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_RANDOM_POOL, generator=generator).to(device)
        self._dtype = dtype

    @property
    def described(self) -> str:
        return "random numbers"

    @property
    def is_quantised(self) -> bool:
        return False

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._pool.device)
        start = xxhash.xxh3_64_intdigest(name.encode()) % _RANDOM_POOL
        pool = (self._pool.roll(-start) * shape[-1] ** -0.5).to(self._dtype)
        size = torch.Size(shape).numel()
        return pool.repeat(-(-size // _RANDOM_POOL))[:size].view(shape).clone()

    def read_codes(self, name: str) -> QuantizedWeight | None:
        return None

    def will_read(self, names: Iterable[str]) -> None:
        pass

    def files(self) -> frozenset[Path] | None:
        return None


def open_weights(
    directory: Path,
    spec: ModelSpec,
    load_format: str,
    seed: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> TensorSource:
    """The tensors of `spec`, checked to be there, as --load-format says.

    dtype, device: of the model; what a file holds comes as it is, on the CPU.

    Raises:
        ConfigError: when the directory does not hold them.
    """
    shapes = spec.tensor_shapes()
    if load_format == RANDOM_WEIGHTS:
        return RandomWeights(shapes, seed, dtype, device)
    checkpoint = Checkpoint(directory, format_of(directory, load_format), spec.tensor_name)
    checkpoint.check(shapes)
    checkpoint.check_tied(spec.tied_to, dtype)
    return checkpoint


def _same_bytes(one: FileRange, other: FileRange) -> bool:
    """Whether two tensors' bytes are equal.

    Raises:
        ConfigError: they cannot be read.
    """
    left = one.end - one.begin
    if left != other.end - other.begin:
        return False
    ReadAhead((one, other))
    buffers = bytearray(_AT_ONCE), bytearray(_AT_ONCE)
    try:
        with one.path.open("rb", 0) as first, other.path.open("rb", 0) as second:
            first.seek(one.begin)
            second.seek(other.begin)
            while left > 0:
                views = [memoryview(each)[:left] for each in buffers]
                if first.readinto(views[0]) != second.readinto(views[1]):
                    return False
                if buffers[0] != buffers[1]:
                    return False
                left -= _AT_ONCE
    except OSError as error:
        raise ConfigError(f"{one.path} cannot be read: {error}") from error
    return True


def bytes_digest(tensor: Tensor) -> bytes:
    """Digest a contiguous tensor's bytes, whatever its dtype, shape and device."""
    return xxhash.xxh3_128_digest(tensor.cpu().flatten().view(torch.uint8).numpy().data)


def _digest(tensor: Tensor) -> bytes:
    """Digest a tensor's dtype, shape and bytes."""
    values = tensor.cpu().flatten().view(torch.uint8).numpy().data
    return weight_digest(str(tensor.dtype).removeprefix("torch."), tensor.shape, values)


def _as_codes(name: str) -> str:
    return f"{name} as codes"


class WeightReader:
    """Gives each tensor in the model's dtype on its device, once, and remembers what it gave."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device = _CPU,
        note: Callable[[int], object] | None = None,
        *,
        keeps_codes: bool = False,
    ) -> None:
        """Read from `source`.

        Args:
            source: gives the tensors.
            dtype: of the model.
            device: where tensors are wanted.
            note: told the bytes of each tensor that is taken, as large as it is in `dtype`.
            keeps_codes: whether kernels take the codes that matrices are stored as.
        """
        self.kept: dict[str, str] = {}  # the format of each matrix whose codes were taken
        self.broken: list[str] = []  # tensors that hold infinite or NaN values
        self.biases: dict[str, Tensor] = {}  # what was given as such, on the CPU, in float32
        self._source = source
        self._keeps_codes = keeps_codes
        self.dtype = dtype
        self._device = device
        self._note = note
        self.digests: dict[str, bytes] = {}  # of the tensors given so far

    def take(self, name: str) -> Tensor:
        tensor = self._source.read(name, self.dtype).to(self.dtype).contiguous()
        self.digests[name] = _digest(tensor)
        self._note_values(name, tensor)
        if name.endswith(".bias"):
            self.biases[name] = tensor.float()
        if self._note is not None:
            self._note(tensor.nbytes)
        return tensor.to(self._device)

    def take_table(self, name: str) -> Tensor:
        return self.take(name)

    def take_matrix(self, name: str, *, may_be_codes: bool = True) -> Tensor | QuantizedWeight:
        weight = self.take_codes(name) if may_be_codes else None
        if weight is None:
            self.kept.pop(name, None)
            self.digests.pop(_as_codes(name), None)
            return self.take(name)
        if self._note is not None:
            self._note(weight.codes.numel() * self.dtype.itemsize)
        return weight

    def take_codes(self, name: str) -> QuantizedWeight | None:
        weight = self._source.read_codes(name) if self._keeps_codes else None
        if weight is None:
            return None
        form = weight.format
        self.digests[_as_codes(name)] = framed(
            repr((form.bits, form.group)).encode(),
            _digest(weight.codes),
            _digest(weight.scales),
            b"" if weight.offsets is None else _digest(weight.offsets),
        )
        self.kept[name] = form.name
        self._note_values(name, weight.scales, weight.offsets)
        return weight

    def _note_values(self, name: str, *parts: Tensor | None) -> None:
        if not all(part is None or part.device != _CPU or is_finite(part) for part in parts):
            self.broken.append(name)

    def digest(self) -> bytes:
        """SHA-256 over names, dtypes, shapes and bytes of all tensors given so far."""
        return framed(*(framed(name.encode(), self.digests[name]) for name in sorted(self.digests)))
