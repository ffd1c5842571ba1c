"""Payloads of prompt_embeds: archives and pickles that torch never wrote."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import strategies as st

from lora_serve.errors import InvalidRequestError
from lora_serve.server.openai.prompt_embeds import decode_prompt_embeds
from tests.hostile.harness import run_long, run_quick
from tests.hostile.mutations import NUMBERS, harmed
from tests.server.openai.test_prompt_embeds import archive, rows, torch_saved

HIDDEN_SIZE, MAX_TOKENS = 6, 50
DTYPES = ("float32", "bfloat16", "float16")


def header_only(header: object, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


class Evil:
    """Would run a command, if anybody unpickled it."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (exec, ("raise SystemExit('unpickled')",))


def bomb() -> bytes:
    """A megabyte of zeros in a kilobyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * 2**20)
    return buffer.getvalue()


def nearly_empty() -> torch.Tensor:
    """One number, in as much room as its shape claims."""
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (2**20, 2**20))


SOUND = [
    *(torch_saved(rows(dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
    torch_saved(rows(8)[::2]),
    torch_saved(rows()[None]),
    header_only(
        {"x": {"dtype": "F32", "shape": [2, 6], "data_offsets": [0, 48]}},
        struct.pack("<12f", *range(12)),
    ),
]
FOREIGN = [
    torch_saved(rows().to_sparse()),
    torch_saved(nearly_empty()),
    torch_saved(torch.ones(1).expand(2**30, 6)[:0]),
    torch_saved([rows()]),
    torch_saved(rows().to(torch.complex64)),
    torch_saved(torch.nn.Parameter(rows())),
    archive(pickle.dumps(Evil(), protocol=2)),
    pickle.dumps(Evil()),
    bomb(),
    *(header_only({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}, b"\0" * 8)
      for shape in ([2**40, 6], [2**62, 2**62], [0, 6], [6], [2, 6])),
]  # fmt: skip

OPCODES = st.sampled_from([*b"ctorch._utils\n", *b"().0q\x00h\x00tRQKMJX\x85\x86\x87\x88\x89N\x8a"])
PICKLES = st.lists(OPCODES, max_size=80).map(lambda codes: b"\x80\x02" + bytes(codes) + b".")


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Safetensors whose header says anything of few bytes."""
    entry = {
        "dtype": draw(st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "", "F8_E4M3", 5])),
        "shape": draw(st.lists(NUMBERS | st.integers(-2, 8), max_size=4)),
        "data_offsets": draw(st.lists(NUMBERS, max_size=3)),
    }
    names = draw(st.lists(st.sampled_from(["x", "y", "__metadata__"]), max_size=3))
    return header_only(dict.fromkeys(names, entry), draw(st.binary(max_size=100)))


PAYLOADS = st.one_of(
    *(harmed(data) for data in SOUND),
    *(harmed(data, 1) for data in FOREIGN),
    PICKLES.map(archive),
    headers(),
)
CASES = st.tuples(
    PAYLOADS.map(lambda data: base64.b64encode(data).decode()) | st.text(max_size=20),
    st.sampled_from(DTYPES),
)


def check(case: object) -> None:
    assert isinstance(case, tuple)
    payload, dtype = case
    try:
        prompt = decode_prompt_embeds(
            payload, hidden_size=HIDDEN_SIZE, dtype=dtype, max_tokens=MAX_TOKENS
        )
    except InvalidRequestError as error:
        check_refusal(error)
    else:
        assert 0 < prompt.num_tokens <= MAX_TOKENS
        assert len(prompt.data) == prompt.num_tokens * HIDDEN_SIZE * getattr(torch, dtype).itemsize


def check_refusal(error: InvalidRequestError) -> None:
    assert error.param == "prompt_embeds"
    assert str(error).startswith("`prompt_embeds` ")
    assert len(str(error).encode()) < 1000


def test_no_payload_harms_the_server() -> None:
    for data in FOREIGN:
        check((base64.b64encode(data).decode(), "float32"))
    run_quick(CASES, check, 1000)


@pytest.mark.slow
def test_no_payload_harms_the_server_for_minutes() -> None:
    assert run_long(CASES, check)
