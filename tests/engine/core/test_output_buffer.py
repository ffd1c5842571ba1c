from __future__ import annotations

import pytest

from lora_serve import errors
from lora_serve.engine.wire import error_from_info, error_info
from lora_serve.errors import (
    AdapterFormatError,
    InvalidRequestError,
    LoraServeError,
    OverloadedError,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("n must be 1", "n"),
        AdapterFormatError("/a", ["rank 9", "bias"]),
        errors.AdapterChangedError("changed"),
        errors.EngineDeadError("dead"),
    ],
)
def test_an_error_crosses_processes_as_itself(error: LoraServeError) -> None:
    back = error_from_info(error_info(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert getattr(back, "param", None) == getattr(error, "param", None)
    if isinstance(error, AdapterFormatError):
        assert back.findings == error.findings  # type: ignore[attr-defined]


def test_an_overloaded_error_keeps_its_hint() -> None:
    back = error_from_info(error_info(OverloadedError("full", 7)))
    assert isinstance(back, OverloadedError)
    assert back.retry_after_seconds == 7
