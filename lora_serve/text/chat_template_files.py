"""The chat templates of a model's files, read without its tokenizer, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from lora_serve.gguf.header import read_header
from lora_serve.gguf.location import gguf_file
from lora_serve.regular_file import MAX_JSON_BYTES, read_regular
from lora_serve.text.generation_config import read_model_json
from lora_serve.text.model_files import model_file


def chat_templates(source: str, revision: str | None) -> str:
    """All templates of a directory, repository or GGUF file, one behind the other; "" without any.

    For questions of what no template holds: which one is used is the tokenizer's to say.
    """
    file = gguf_file(source, revision)
    if file is not None:
        return "\n".join(_texts(read_header(file).metadata.get("tokenizer.chat_template")))
    found: list[str] = []
    for name in ("tokenizer_config.json", "chat_template.json"):
        found += _texts(read_model_json(source, revision, name).get("chat_template"))
    path = model_file(source, revision, "chat_template.jinja")
    files = [] if path is None else [path]
    files += Path(source).expanduser().glob("additional_chat_templates/*.jinja")
    found += [read_regular(file, MAX_JSON_BYTES).decode(errors="replace") for file in files]
    return "\n".join(found)


def _texts(value: object) -> list[str]:
    """The texts of one template, or of a list of several with their names."""
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        return [text for row in rows for text in _texts(row.get("template"))]
    return [value] if isinstance(value, str) else []
