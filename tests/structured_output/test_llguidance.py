"""What llguidance cannot read is refused for that reason."""

from __future__ import annotations

import json

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Vocabulary
from lora_serve.structured_output.llguidance import LLGuidanceBackend, _json_grammar
from lora_serve.structured_outputs import StructuredOutput
from lora_serve.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("schema", "reason"),
    [("false", "Expecting object schema"), ('{"const":' + "9" * 4000 + "}", "out of range")],
)
def test_a_schema_that_cannot_be_read_is_refused_for_its_own_reason(
    schema: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        _json_grammar(schema, is_lenient=False)


def backend_of(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> LLGuidanceBackend:
    return LLGuidanceBackend(
        Vocabulary(
            tokenizer.to_json(),
            tokenizer.vocab_size,
            eos_token_ids,
            tokenizer.token_bytes,
            tokenizer.special_token_ids,
        )
    )


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> LLGuidanceBackend:
    return backend_of(tokenizer, tokenizer.eos_token_ids)


def test_an_end_token_that_the_tokenizer_does_not_know_is_left_out(tokenizer: Tokenizer) -> None:
    """The model's logits may have a row for it."""
    ends = (tokenizer.vocab_size, *tokenizer.eos_token_ids)
    assert takes(backend_of(tokenizer, ends), tokenizer, StructuredOutput.of(regex="a"), "a")


def takes(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, constraint: StructuredOutput, text: str
) -> bool:
    """Whether an answer to the constraint may begin with the text."""
    matcher = backend.compile(constraint).matcher()
    try:
        for token_id in tokenizer.encode(text):
            matcher.accept(token_id)
    except InvalidRequestError:
        return False
    return True


def tag(trigger: str, begin: str, schema: object = True) -> StructuredOutput:
    structure = {"begin": begin, "schema": schema, "end": "</a>"}
    given = {"type": "structural_tag", "structures": [structure], "triggers": [trigger]}
    return StructuredOutput("structural_tag", json.dumps(given))


@pytest.mark.parametrize(("trigger", "begin"), [("<a>", "<a>"), ("<a", "<a>"), ("<a>", "<a>b")])
def test_a_trigger_that_looks_like_a_special_token_may_be_text(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, trigger: str, begin: str
) -> None:
    integers = tag(trigger, begin, {"type": "integer"})
    assert takes(backend, tokenizer, integers, f"well {begin}17</a> and {begin}4")
    assert not takes(backend, tokenizer, integers, f"well {begin}no")
    assert takes(backend, tokenizer, tag(trigger, begin), f'{begin}"any JSON"</a>')
    with pytest.raises(InvalidRequestError, match="no text matches the schema false"):
        backend.compile(tag(trigger, begin, False))


def test_the_schema_true_is_matched_by_any_json(
    backend: LLGuidanceBackend, tokenizer: Tokenizer
) -> None:
    anything = StructuredOutput("json", "true")
    assert takes(backend, tokenizer, anything, '[1, {"a": null}]')
    assert not takes(backend, tokenizer, anything, "no JSON")


def test_special_tokens_and_texts_like_them_can_both_be_triggers(tokenizer: Tokenizer) -> None:
    special_id = min(tokenizer.special_token_ids)
    special, backend = tokenizer.token_text(special_id), backend_of(tokenizer, (special_id - 1,))
    integer = {"type": "integer"}
    structures = [{"begin": b, "schema": integer, "end": "."} for b in (special, "<a>")]
    given = {"type": "structural_tag", "structures": structures, "triggers": [special, "<a>"]}
    constraint = StructuredOutput("structural_tag", json.dumps(given))
    assert takes(backend, tokenizer, constraint, f"well {special}17. and <a>4. and {special}5")
    for trigger in (special, "<a>"):
        assert not takes(backend, tokenizer, constraint, f"well {trigger}no")
