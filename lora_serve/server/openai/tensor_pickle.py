"""Reads the pickle that torch.save writes for dense tensors: which storage, which view of it.

Builds plain values and calls nothing. torch.load, with weights_only too, calls bytearray(2**45) if
a pickle asks for it (torch 2.13).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

_MAX_BYTES = 4096  # about 200 for a tensor
_MAX_NAMED_BYTES = 4 * 2**20
_ADVICE = "send one dense tensor, saved by torch.save(tensor.contiguous(), file)"
_KINDS = MappingProxyType(
    {
        "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
        "torch._utils._rebuild_qtensor": "a quantized tensor",
        "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
        "torch._utils._rebuild_nested_tensor": "a nested tensor",
        "torch._utils._rebuild_tensor_v3": "a tensor of a dtype that is not accepted",
        "torch._tensor._rebuild_from_type_v2": "a tensor with attributes, or of a subclass",
    }
)


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """kind: torch's class, as "torch.FloatStorage". key: names the zip entry with the values."""

    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """offset and strides count values of the storage, as in torch."""

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


def read_tensor_pickle(data: memoryview) -> PickledTensor:
    """The tensor that a pickle describes.

    Raises:
        ValueError: it describes anything else, or nothing.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"its pickle has {len(data)} bytes, too many for one tensor; {_ADVICE}")
    value = _Machine(bytes(data)).run()
    if isinstance(value, dict):
        raise ValueError(f"it is not a tensor alone, but a dict; {_ADVICE}")
    if not isinstance(value, PickledTensor):
        raise ValueError(f"it holds no tensor; {_ADVICE}")
    return value


def read_named_tensors_pickle(data: memoryview) -> dict[str, PickledTensor]:
    """The tensors that a pickled dict describes, by name.

    Raises:
        ValueError: it describes anything else, or nothing.
    """
    if len(data) > _MAX_NAMED_BYTES:
        raise ValueError(f"its pickle has {len(data)} bytes, at most {_MAX_NAMED_BYTES} are read")
    value = _Machine(bytes(data)).run()
    if not isinstance(value, dict):
        raise ValueError("it holds no dict; send a dict of names and dense tensors")
    tensors = {name: item for name, item in value.items() if isinstance(item, PickledTensor)}
    if len(tensors) < len(value):
        name = next(name for name in value if name not in tensors)
        raise ValueError(f"{name[:80]!r} is no tensor; send a dict of names and dense tensors")
    return tensors


class _Machine:
    """A pickle's stack, for the operations that torch.save uses.

    Values are never hashed, compared or printed before their type is known: a tuple may hold
    itself a thousandfold.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        while (opcode := self._take(1)) != b".":
            if opcode not in _OPERATIONS:
                raise ValueError(
                    f"it is not a tensor alone (pickle operation {opcode!r}); {_ADVICE}"
                )
            _OPERATIONS[opcode](self)
        return self._pop()

    def _take(self, size: int) -> bytes:
        taken = self._data[self._position : self._position + size]
        if len(taken) < size:
            raise ValueError("its pickle is cut off")
        self._position += size
        return taken

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            raise ValueError("its pickle is cut off")
        return self._take(end + 1 - self._position)[:-1].decode("utf-8", "replace")

    def _pop(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle takes more values than it has")
        return self._stack.pop()

    def push(self, value: object) -> None:
        self._stack.append(value)

    def protocol(self) -> None:
        self._take(1)

    def find_global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if name in _KINDS:
            raise ValueError(f"it is {_KINDS[name]}; {_ADVICE}")
        self.push(_Global(name))

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def tuple_since_mark(self) -> None:
        if not self._marks:
            raise ValueError("its pickle takes more values than it has")
        start = self._marks.pop()
        items = tuple(self._stack[start:])
        del self._stack[start:]
        self.push(items)

    def tuple_of(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self.push(tuple(reversed(items)))

    def number(self, layout: str) -> None:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        self.push(value)

    def long_number(self) -> None:
        self.push(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def text(self) -> None:
        (size,) = struct.unpack("<I", self._take(4))
        self.push(self._take(size).decode("utf-8", "replace"))

    def remember(self, layout: str) -> None:
        (index,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        value = self._pop()
        self._memo[index] = value
        self.push(value)

    def recall(self, layout: str) -> None:
        (index,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        if index not in self._memo:
            raise ValueError("its pickle recalls what it never remembered")
        self.push(self._memo[index])

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def set_items_since_mark(self) -> None:
        if not self._marks:
            raise ValueError("its pickle takes more values than it has")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        self._set_items(items)

    def _set_items(self, items: list[object]) -> None:
        """items: keys and values by turns."""
        mapping = self._pop()
        if not isinstance(mapping, dict) or len(items) % 2:
            raise ValueError("its pickle sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or key in mapping:
                raise ValueError("a key of its dict is no text, or stands there twice")
            mapping[key] = value
        self.push(mapping)

    def drop_state(self) -> None:
        """Leave out what is set on a dict itself, as torch's state_dict has `_metadata`."""
        self._pop()
        value = self._pop()
        if not isinstance(value, dict):
            raise ValueError("its pickle sets the attributes of what is no dict")
        self.push(value)

    def storage(self) -> None:
        match self._pop():
            case (str(tag), _Global(kind), str(key), str(), int()) if tag == "storage":
                self.push(PickledStorage(kind, key))
            case _:
                raise ValueError("its pickle names a storage in a way that torch.save does not")

    def call(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Global("collections.OrderedDict"), ():
                self.push({})
            case (
                _Global("torch._utils._rebuild_tensor_v2"),
                (PickledStorage() as storage, int(offset), tuple(shape), tuple(strides), bool(), _),
            ) if len(shape) == len(strides):
                self.push(PickledTensor(storage, offset, _counts(shape), _counts(strides)))
            case (
                _Global("torch._utils._rebuild_parameter"),
                (PickledTensor() as tensor, bool(), _),
            ):
                self.push(tensor)
            case _Global(name), _:
                raise ValueError(f"its pickle calls {name[:80]} as no dense tensor does; {_ADVICE}")
            case _:
                raise ValueError("its pickle calls what cannot be called")


def _counts(values: tuple[object, ...]) -> tuple[int, ...]:
    counts = tuple(value for value in values if type(value) is int)
    if len(counts) != len(values):
        raise ValueError("its shape holds something else than integers")
    return counts


_OPERATIONS: MappingProxyType[bytes, Callable[[_Machine], None]] = MappingProxyType(
    {
        b"\x80": _Machine.protocol,
        b"c": _Machine.find_global,
        b"(": _Machine.mark,
        b"t": _Machine.tuple_since_mark,
        b")": lambda machine: machine.tuple_of(0),
        b"\x85": lambda machine: machine.tuple_of(1),
        b"\x86": lambda machine: machine.tuple_of(2),
        b"\x87": lambda machine: machine.tuple_of(3),
        b"K": lambda machine: machine.number("<B"),
        b"M": lambda machine: machine.number("<H"),
        b"J": lambda machine: machine.number("<i"),
        b"\x8a": _Machine.long_number,
        b"N": lambda machine: machine.push(None),
        b"\x88": lambda machine: machine.push(True),
        b"\x89": lambda machine: machine.push(False),
        b"}": lambda machine: machine.push({}),
        b"s": _Machine.set_item,
        b"u": _Machine.set_items_since_mark,
        b"b": _Machine.drop_state,
        b"X": _Machine.text,
        b"q": lambda machine: machine.remember("<B"),
        b"r": lambda machine: machine.remember("<I"),
        b"h": lambda machine: machine.recall("<B"),
        b"j": lambda machine: machine.recall("<I"),
        b"Q": _Machine.storage,
        b"R": _Machine.call,
    }
)
