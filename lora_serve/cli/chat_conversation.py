"""A conversation with a server: what was said, to which model, with which settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lora_serve.cli.chat_stream import (
    CHAT_PATH,
    COMPLETION_PATH,
    Answer,
    Show,
    ask,
    has_no_template,
)
from lora_serve.cli.remote import Json, Remote, RemoteError
from lora_serve.errors import ConfigError

COMPLETION_TOKENS = 256  # most of a continued text, which has no end of its own
OWN_FIELDS = frozenset({"model", "messages", "prompt", "stream", "stream_options", "n"})


class Conversation:
    """continues_text: the model has no chat template, so texts are continued instead."""

    def __init__(self, remote: Remote, model: str, system: str | None = None) -> None:
        self._remote = remote
        self.model = model
        self.system = system
        self.settings: dict[str, object] = {}
        self.messages: list[dict[str, str]] = []
        self.continues_text = False
        self._saved: set[Path] = set()

    def ask(self, question: str, answer: Answer, show: Show) -> None:
        """Say this, and fill `answer` as it comes.

        What came stays in the conversation, also of an answer that was interrupted; a question that
        got nothing does not.

        Raises:
            RemoteError, UnreachableError: the question is forgotten.
            NoTemplateError: the model has no chat template; asked again, it continues text.
        """
        self.messages.append({"role": "user", "content": question})
        try:
            if self.continues_text:
                ask(self._remote, COMPLETION_PATH, self._completion_body(), answer, show)
            else:
                ask(self._remote, CHAT_PATH, self._chat_body(), answer, show)
        except RemoteError as error:
            if self.continues_text or answer.text or not has_no_template(error):
                raise
            self.continues_text = True
            raise NoTemplateError(str(error), error.status) from error
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()

    def use_model(self, name: str) -> None:
        self.model = name
        self.continues_text = False

    def forget(self) -> None:
        """Begin anew, with the model, the system message and the settings as they are."""
        self.messages.clear()

    def set(self, name: str, text: str) -> None:
        """Send this field with each request from now on; without a text, no more.

        Raises:
            ConfigError: the field is the chat's own.
        """
        if name in OWN_FIELDS:
            raise ConfigError(f"{name} is set by the chat itself")
        if not text:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = json.loads(text)
        except ValueError:
            self.settings[name] = text

    def save(self, path: Path) -> None:
        """Write the model, the settings and all messages as the body of a request.

        Raises:
            ConfigError: the file is there and not of this conversation, or cannot be written.
        """
        if path.exists() and path.resolve() not in self._saved:
            raise ConfigError(f"{path} exists already; name another file")
        try:
            path.write_text(json.dumps(self._chat_body(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        self._saved.add(path.resolve())

    def _chat_body(self) -> Json:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self.messages], **self.settings}

    def _completion_body(self) -> Json:
        text = self.system or ""
        for message in self.messages:
            is_question = message["role"] == "user"
            text += ("\n" if is_question and text else "") + message["content"]
        defaults: Mapping[str, object] = {"max_tokens": COMPLETION_TOKENS}
        return {"model": self.model, "prompt": text, **defaults, **self.settings}


class NoTemplateError(RemoteError):
    """A model without a chat template cannot chat."""
