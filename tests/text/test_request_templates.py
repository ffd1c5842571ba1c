"""Templates that requests bring: as the model's own where they are honest, else ended."""

from __future__ import annotations

from typing import NoReturn

import pytest
from jinja2 import TemplateError, TemplateSyntaxError

from lora_serve.chat import template
from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.text.request_templates import Rendering, RequestTemplates, _rendered
from lora_serve.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi \ud83d"}]  # JSON can smuggle in half a character
TEMPLATE = (
    "{{ eos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ size }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONSTANT = "{{ 'x' * 10**10 }}"  # as long as this when it is compiled
GROWING = (
    "{% set n = namespace(x='x') %}{% for i in range(N) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
KEPT = "{% set n.y = [] %}{% for i in range(5) %}{% set n.y = n.y + [n.x ~ i] %}{% endfor %}"


@pytest.fixture(scope="module")
def templates() -> RequestTemplates:
    return RequestTemplates(seconds=1)  # 0 may be a moment: whole seconds are counted


def test_templates_of_requests_are_rendered_within_bounds(
    byte_level: Tokenizer, templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, since it takes a second to start a process, and two are ended here."""
    monkeypatch.setattr(byte_level, "_request_templates", templates)

    def render(template: str, *, trusts_template: bool = False, max_chars: int = 10**6) -> str:
        return byte_level.render_chat(
            MESSAGES,
            chat_template=template,
            tools=[{"type": "function"}],
            template_kwargs={"size": 10**30},
            max_chars=max_chars,
            trusts_template=trusts_template,
        )

    honest = render(TEMPLATE, trusts_template=True)
    assert f"user: hi \ud83d{10**30}[" in honest
    assert render(TEMPLATE) == honest
    with pytest.raises(PromptTooLongError, match="writes more than 3 characters"):
        render(TEMPLATE, max_chars=3)
    with pytest.raises(InvalidRequestError, match="the chat template refused the messages: No"):
        render("{{ raise_exception('No' * 10**6) }}")
    for hungry in (CONSTANT, GROWING.replace("N", "40")):
        with pytest.raises(InvalidRequestError, match="makes more than 1024 MiB"):
            render(hungry)
    with pytest.raises(InvalidRequestError, match="processor time, or 256 MiB of memory"):
        render(GROWING.replace("N", "26") + KEPT)
    with pytest.raises(InvalidRequestError, match="takes more than 1 s of processor time"):
        render(LOOP)
    assert render(TEMPLATE) == honest, "another process goes on"
    assert templates._process is not None
    templates._process.kill()
    templates._process.wait()
    assert render(TEMPLATE) == honest, "no template is to blame"
    templates.close()


@pytest.mark.parametrize("name", [TemplateSyntaxError("", 1), TemplateError("anything")])
def test_a_want_of_memory_ends_the_process_whatever_jinja_calls_it(
    name: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lexer says of each error in a constant that the line is no Jinja."""

    def compiled(*_: object) -> NoReturn:
        raise name from MemoryError()

    monkeypatch.setattr(template, "compiled", compiled)
    with pytest.raises(MemoryError):
        _rendered(Rendering("{{ 'x' }}", MESSAGES, None, {}, True, False, None))
