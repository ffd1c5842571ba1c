"""Templates that requests bring: as the model's own where they are honest, else ended."""

from __future__ import annotations

import pytest

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.text.request_templates import RequestTemplates
from lora_serve.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi \ud83d"}]  # JSON can smuggle in half a character
TEMPLATE = (
    "{{ eos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ size }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONSTANT = "{{ 'x' * 10**10 }}"  # as long as this when it is compiled
GROWING = (
    "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


@pytest.fixture(scope="module")
def templates() -> RequestTemplates:
    return RequestTemplates(seconds=1)  # 0 may be a moment: whole seconds are counted


def test_templates_of_requests_are_rendered_within_bounds(
    byte_level: Tokenizer, templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, since it takes a second to start a process, and one of them is ended here."""
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
    for hungry in (CONSTANT, GROWING):
        with pytest.raises(InvalidRequestError, match=r"MemoryError|makes more than \d+ MiB"):
            render(hungry)
    with pytest.raises(InvalidRequestError, match="takes more than 1 s of processor time"):
        render(LOOP)
    assert render(TEMPLATE) == honest, "another process goes on"
    assert templates._process is not None
    templates._process.kill()
    templates._process.wait()
    assert render(TEMPLATE) == honest, "no template is to blame"
    templates.close()
