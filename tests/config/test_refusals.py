from __future__ import annotations

import pytest

from lora_serve.config.refusals import Refusals
from lora_serve.errors import AdapterError, ConfigError, LoraServeError


def refused(*errors: LoraServeError) -> Refusals:
    refusals = Refusals()
    for error in errors:
        with refusals.noted():
            raise error
    return refusals


def test_nothing_refused_raises_nothing() -> None:
    refused().raise_noted()


def test_one_refusal_is_raised_as_it_is() -> None:
    error = AdapterError("too large")
    with pytest.raises(AdapterError) as caught:
        refused(error).raise_noted()
    assert caught.value is error


def test_several_refusals_are_a_line_each_and_none_comes_twice() -> None:
    errors = (ConfigError("port"), AdapterError("rank"), ConfigError("port"))
    with pytest.raises(ConfigError, match=r"^port\nrank$"):
        refused(*errors).raise_noted()


def test_what_is_no_refusal_is_raised_at_once() -> None:
    refusals = Refusals()
    with pytest.raises(ZeroDivisionError), refusals.noted():
        1 / 0  # noqa: B018
    refusals.raise_noted()
