"""What llguidance cannot read is refused for that reason."""

from __future__ import annotations

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.llguidance import _json_grammar


@pytest.mark.parametrize(
    ("schema", "reason"),
    [("false", "Expecting object schema"), ('{"const":' + "9" * 4000 + "}", "out of range")],
)
def test_a_schema_that_cannot_be_read_is_refused_for_its_own_reason(
    schema: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        _json_grammar(schema, is_lenient=False)
