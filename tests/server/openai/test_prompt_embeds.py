from __future__ import annotations

import base64
import io
import pickle
import tracemalloc
import zipfile

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import EmbedsPrompt
from lora_serve.server.openai.prompt_embeds import decode_prompt_embeds

HIDDEN_SIZE = 6
MAX_TOKENS = 50
BF16 = torch.bfloat16


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def torch_saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(data: bytes, dtype: str = "float32") -> EmbedsPrompt:
    return decode_prompt_embeds(
        encoded(data), hidden_size=HIDDEN_SIZE, dtype=dtype, max_tokens=MAX_TOKENS
    )


def refusal(data: bytes, dtype: str = "float32") -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(data, dtype)
    assert caught.value.param == "prompt_embeds"
    return str(caught.value)


def values(prompt: EmbedsPrompt, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(prompt.data), dtype=dtype)
    return flat.reshape(prompt.num_tokens, HIDDEN_SIZE)


def rows(num_rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(dtype)


def archive(pickled: bytes, storage: bytes = b"\0" * 96, **extra: bytes) -> bytes:
    """A zip file as torch.save's, with a pickle of one's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", storage)
        for name, content in extra.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def pickled_tensor(tensor: torch.Tensor) -> bytes:
    with zipfile.ZipFile(io.BytesIO(torch_saved(tensor))) as file:
        return file.read("archive/data.pkl")


# What is accepted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_rounded_to_the_models_dtype(dtype: torch.dtype, model_dtype: str) -> None:
    tensor, target = rows(dtype=dtype), getattr(torch, model_dtype)
    for data in (torch_saved(tensor), safetensors.torch.save({"embeds": tensor})):
        prompt = decode(data, model_dtype)
        assert prompt.num_tokens == 4
        assert torch.equal(values(prompt, target), tensor.to(target))


def test_both_formats_give_the_same_bytes() -> None:
    assert decode(torch_saved(rows())) == decode(safetensors.torch.save({"x": rows()}))


@pytest.mark.parametrize(
    "tensor",
    [
        rows()[None],
        rows(9)[3:7],
        torch.randn(HIDDEN_SIZE, 4).t(),
        torch.randn(8, 2 * HIDDEN_SIZE)[::2, ::2],
        torch.nn.Parameter(rows()),
        rows(1),
        torch.randn(HIDDEN_SIZE, 1).t(),
        rows(MAX_TOKENS),
    ],
    ids=["batch of one", "slice", "transposed", "steps", "parameter", "one", "column", "most"],
)
def test_a_view_is_read_as_torch_reads_it(tensor: torch.Tensor) -> None:
    data = torch_saved(tensor)
    expected = torch.load(io.BytesIO(data), weights_only=True).detach()
    assert torch.equal(values(decode(data)), expected.reshape(-1, HIDDEN_SIZE))


def test_a_tensor_saved_on_a_gpu_is_read() -> None:
    pickled = pickled_tensor(rows()).replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
    storage = rows().numpy().tobytes()
    assert torch.equal(values(decode(archive(pickled, storage))), rows())


# Shape, type and values


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (rows()[0], "must be a 2D tensor of shape (num_tokens, hidden_size); got shape (6)"),
        (torch.zeros(2, 3, HIDDEN_SIZE), "must be a 2D tensor of shape (num_tokens, hidden_size)"),
        (torch.zeros(1, 1, 3, HIDDEN_SIZE), "got shape (1, 1, 3, 6)"),
        (torch.tensor(1.0), "got shape ()"),
        (torch.zeros(3, 7), "hidden_size 7 does not match the model's hidden_size 6."),
        (torch.zeros(0, HIDDEN_SIZE), "must have at least one row, got 0"),
        (torch.zeros(2, HIDDEN_SIZE, dtype=torch.int64), "must be of dtype torch.float64,"),
        (torch.zeros(2, HIDDEN_SIZE, dtype=torch.bool), "must be of dtype torch.float64,"),
        (torch.zeros(2, HIDDEN_SIZE, dtype=torch.complex64), "must be of dtype torch.float64,"),
    ],
)
def test_another_shape_or_type_is_refused_in_both_formats(
    tensor: torch.Tensor, message: str
) -> None:
    for data in (torch_saved(tensor), safetensors.torch.save({"x": tensor})):
        assert refusal(data).startswith("`prompt_embeds` ")
        assert message in refusal(data)


def test_more_rows_than_the_context_holds_are_refused_with_the_limit() -> None:
    data = torch_saved(rows(MAX_TOKENS + 1))
    assert "has 51 rows, more than the model's context of 50 tokens" in refusal(data)
    with pytest.raises(PromptTooLongError):
        decode(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_refused_with_its_row(value: float) -> None:
    tensor = rows()
    tensor[2, 1] = value
    assert "must be finite; row 2 has NaN or infinity" in refusal(torch_saved(tensor))


def test_a_value_that_the_models_dtype_cannot_hold_is_refused() -> None:
    tensor = rows()
    tensor[1, 0] = 1e6
    message = "must fit the model's float16; row 1 has a value that is too large"
    assert message in refusal(torch_saved(tensor), "float16")
    assert decode(torch_saved(tensor), "bfloat16").num_tokens == 4


# Not a tensor


@pytest.mark.parametrize("payload", ["", "AAAA"])
def test_what_is_neither_format_is_refused(payload: str) -> None:
    with pytest.raises(InvalidRequestError, match="neither a zip file as of"):
        decode_prompt_embeds(payload, hidden_size=6, dtype="float32", max_tokens=5)


@pytest.mark.parametrize("payload", ["A", "AA=A", "AAA-", "AAA_", "AA AA", "AAA=\n", "é", "\ud800"])
def test_what_is_no_strict_base64_is_refused(payload: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be base64 with the standard alphabet"):
        decode_prompt_embeds(payload, hidden_size=6, dtype="float32", max_tokens=5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": rows()}, "it is not a tensor alone"),
        ([rows()], "it is not a tensor alone"),
        (rows().to_sparse(), "it is a sparse tensor"),
        (torch.empty(2, HIDDEN_SIZE, device="meta"), "it is a meta tensor"),
        (torch.zeros(2, HIDDEN_SIZE, dtype=torch.float8_e4m3fn), "a dtype that is not accepted"),
    ],
    ids=["dict", "list", "sparse", "meta", "float8"],
)
def test_another_kind_of_value_is_refused_by_name(value: object, message: str) -> None:
    found = refusal(torch_saved(value))
    assert found.startswith("`prompt_embeds` could not be deserialized as a torch tensor: ")
    assert message in found


def test_several_tensors_are_refused() -> None:
    data = safetensors.torch.save({"x": rows(), "y": rows()})
    assert "it holds 2 tensors, send one alone" in refusal(data)


def test_torchs_old_format_is_refused_with_what_to_do() -> None:
    buffer = io.BytesIO()
    torch.save(rows(), buffer, _use_new_zipfile_serialization=False)
    assert "save it with torch.save(tensor, file) alone" in refusal(buffer.getvalue())


def test_a_big_endian_file_is_refused() -> None:
    data = archive(pickled_tensor(rows()), byteorder=b"big")
    assert "big-endian" in refusal(data)


# Attacks


def peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        refusal(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_sparse_tensor_of_24_tib_is_refused_before_it_grows() -> None:
    indices = torch.tensor([[0], [0]])
    with torch.sparse.check_sparse_tensor_invariants():
        tensor = torch.sparse_coo_tensor(indices, torch.ones(1), (2**40, HIDDEN_SIZE))
    data = torch_saved(tensor)
    assert len(data) < 3000
    assert "sparse" in refusal(data)
    assert peak_bytes(data) < 2**20


def test_an_expanded_view_of_few_values_is_refused_before_it_grows() -> None:
    data = torch_saved(torch.zeros(1, HIDDEN_SIZE).expand(MAX_TOKENS, HIDDEN_SIZE))
    assert "declares 300 values but holds 6; save tensor.contiguous()" in refusal(data)
    huge = torch_saved(torch.zeros(1).expand(2**40, HIDDEN_SIZE))
    assert "rows, more than the model's context" in refusal(huge)
    assert peak_bytes(huge) < 2**20


def test_compressed_entries_are_refused_before_they_grow() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled_tensor(rows()))
        file.writestr("archive/data/0", b"\0" * 2**24)
    assert "compressed or encrypted" in refusal(buffer.getvalue())
    assert peak_bytes(buffer.getvalue()) < 2**20


def test_a_directory_of_many_entries_is_refused_unread() -> None:
    data = archive(b"", **{f"n{number}": b"" for number in range(100)})
    assert "its zip file has 102 entries" in refusal(data)


def test_a_safetensors_header_of_many_bytes_is_refused_unread() -> None:
    data = (2**27).to_bytes(8, "little") + b"{" + b" " * 5000
    assert "neither" in refusal(data)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize(
    "value",
    [
        Call(eval, "1 / 0"),
        Call(bytearray, 2**45),
        Call(torch.FloatTensor, 2**40),
        Call(torch.Size, [2**60]),
        Call(__import__, "os"),
    ],
)
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(value: object) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = archive(pickle.dumps(value, protocol))
        assert "could not be deserialized as a torch tensor" in refusal(data)


def tensor_pickle(
    *, key: str = "0", offset: int = 0, shape: object = (4, 6), strides: object = (6, 1)
) -> bytes:
    """The pickle of a tensor that torch itself would refuse to make."""

    class Storage:
        pass

    class Pickler(pickle._Pickler):  # the one in Python, which lets a global be named freely
        def persistent_id(self, value: object) -> object:
            if isinstance(value, Storage):
                return ("storage", torch.FloatStorage, key, "cpu", 24)
            return None

    buffer = io.BytesIO()
    arguments = (Storage(), offset, shape, strides, False, None)
    Pickler(buffer, 2).dump(Call(torch._utils._rebuild_tensor_v2, *arguments))
    return buffer.getvalue()


def test_a_pickle_of_ones_own_is_read_like_torchs() -> None:
    data = archive(tensor_pickle(), rows().numpy().tobytes())
    assert torch.equal(values(decode(data)), rows())


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (tensor_pickle(offset=1), "reaches beyond the 24 values that it holds"),
        (tensor_pickle(offset=-1), "reaches beyond"),
        (tensor_pickle(offset=2**200), "reaches beyond"),
        (tensor_pickle(strides=(7, 1)), "reaches beyond"),
        (tensor_pickle(offset=23, strides=(-6, -1)), "reaches beyond"),
        (tensor_pickle(shape=(5, 6)), "declares 30 values but holds 24"),
        (tensor_pickle(shape=(2**200, 6)), "rows, more than"),
        (tensor_pickle(shape=(-1, 6)), "at least one row, got -1"),
        (tensor_pickle(shape=(4,), strides=(6, 1)), "as no dense tensor does"),
        (tensor_pickle(shape=(4, "6")), "something else than integers"),
        (tensor_pickle(shape=(True, 6)), "something else than integers"),
        (tensor_pickle(shape=[4, 6]), "not a tensor alone"),
        (tensor_pickle(key="1"), "the zip entry with the tensor's values is missing"),
        (tensor_pickle(key="../0"), "the zip entry with the tensor's values is missing"),
        (b"\x80\x02)R.", "takes more values than it has"),
        (b"\x80\x02N)R.", "calls what cannot be called"),
        (b"\x80\x02N.", "it holds no tensor"),
        (b"\x80\x02K\x01Q.", "names a storage in a way"),
        (b"\x80\x02h\x05.", "recalls what it never remembered"),
        (b"\x80\x02t.", "takes more values than it has"),
        (b"\x80\x02X\xff\xff\xff\xffa", "its pickle is cut off"),
        (b"\x80\x02cos", "its pickle is cut off"),
        (b"\x80\x02" + b")\x86" * 10_000, "too many for one tensor"),
        (b"\x80\x02)" + b"q\x00h\x00\x86" * 500 + b".", "it holds no tensor"),
    ],
)
def test_a_forged_pickle_is_refused_with_its_fault(pickled: bytes, message: str) -> None:
    assert message in refusal(archive(pickled, rows().numpy().tobytes()))


def test_a_row_stride_of_any_size_is_no_matter_with_one_row() -> None:
    data = archive(tensor_pickle(shape=(1, 6), strides=(2**100, 1)), rows().numpy().tobytes())
    assert torch.equal(values(decode(data)), rows()[:1])


def test_a_flipped_bit_of_a_value_is_noticed() -> None:
    data = bytearray(torch_saved(rows()))
    data[data.index(rows().numpy().tobytes()) + 5] ^= 1
    assert "does not match its checksum" in refusal(bytes(data))


VALID = [
    torch_saved(rows()),
    torch_saved(torch.nn.Parameter(rows(9)[::2])),
    safetensors.torch.save({"x": rows(), "y": rows()}),
    safetensors.torch.save({"x": rows()}, {"key": "value"}),
]
EDITS = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 3), st.binary(max_size=6)), max_size=4
)


def edited(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for position, num_removed, inserted in edits:
        position %= len(data) + 1
        data = data[:position] + inserted + data[position + num_removed :]
    return data


def check_any(data: bytes) -> None:
    """Whatever it is, it is a prompt within the limits or an error about prompt_embeds."""
    try:
        prompt = decode(data)
    except InvalidRequestError as error:
        fault = error
    else:
        assert 1 <= prompt.num_tokens <= MAX_TOKENS
        assert values(prompt).isfinite().all()
        return
    assert fault.param == "prompt_embeds"
    assert len(str(fault)) < 1000


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=300), magic=st.sampled_from([b"", b"PK\x03\x04", b"\x40" + b"\0" * 7])
)
def test_any_bytes_are_a_prompt_or_an_error(data: bytes, magic: bytes) -> None:
    check_any(magic + data)


@settings(max_examples=300, deadline=None)
@given(data=st.sampled_from(VALID), edits=EDITS)
def test_any_damage_to_a_file_is_a_prompt_or_an_error(
    data: bytes, edits: list[tuple[int, int, bytes]]
) -> None:
    check_any(edited(data, edits))


@settings(max_examples=300, deadline=None)
@given(pickled=st.sampled_from([pickled_tensor(rows()), tensor_pickle()]), edits=EDITS)
@example(pickled=b"\x80\x02((((((", edits=[])
def test_any_damage_to_a_pickle_is_a_prompt_or_an_error(
    pickled: bytes, edits: list[tuple[int, int, bytes]]
) -> None:
    check_any(archive(edited(pickled, edits)))


@settings(max_examples=300, deadline=None)
@given(
    operations=st.lists(
        st.sampled_from(
            [bytes([op]) for op in b"(t)NQR\x85\x86\x87\x88\x89.}]abesu0129IFSVLd\x93\x94\x95\x96"]
            + [b"K\x01", b"M\x01\x02", b"\x8a\x09" + b"\xff" * 9, b"q\x00", b"h\x00"]
            + [
                b"X\x07\0\0\0storage",
                b"X\x01\0\0\x000",
                b"\x8b\xff\xff\xff\xff",
                b"B\xff\xff\xff\x7f",
            ]
            + [f"c{name}\n".encode() for name in ("torch\nFloatStorage", "os\nsystem")]
            + [b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"]
        ),
        max_size=40,
    )
)
def test_any_operations_of_a_pickle_are_a_prompt_or_an_error(operations: list[bytes]) -> None:
    check_any(archive(b"\x80\x02" + b"".join(operations) + b"."))


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_values_are_rounded_to_the_very_bits_of_torch(source: str, target: str) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32)
    halves = torch.cat([patterns.to(torch.int16).view(kind) for kind in (torch.float16, BF16)])
    words = torch.randint(-(2**31), 2**31, (2**16,), dtype=torch.int64).to(torch.int32)
    words = torch.cat([words, patterns << 16, (patterns << 16) + 0x8000, (patterns << 16) - 1])
    floats = torch.cat([halves.double(), words.view(torch.float32).double()])
    nudged = floats * (1 + torch.randn(len(floats), dtype=torch.float64) * 2**-25)
    stored = torch.cat([floats, nudged]).to(getattr(torch, source))
    expected = stored.to(getattr(torch, target))
    expected = expected[expected.isfinite()]
    stored = stored[stored.to(getattr(torch, target)).isfinite()]
    prompt = decode_prompt_embeds(
        encoded(torch_saved(stored[None])),
        hidden_size=len(stored),
        dtype=target,
        max_tokens=1,
    )
    assert prompt.data == expected.view(torch.uint8).numpy().tobytes()
