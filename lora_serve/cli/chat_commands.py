"""What lines that begin with a slash do in `lora-serve chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_serve.cli.chat_conversation import Conversation
from lora_serve.cli.parser import did_you_mean
from lora_serve.cli.remote import Remote, ServedModel
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """act: does it with the rest of the line, and returns what to tell."""

    argument: str
    help: str
    act: Callable[[ChatCommands, str], str]


class EndOfChat(Exception):
    """The user has had enough."""


class ChatCommands:
    """The commands of one conversation."""

    def __init__(self, remote: Remote, conversation: Conversation) -> None:
        self._remote = remote
        self._conversation = conversation

    def run(self, line: str) -> str:
        """Do what the line says; returns what to tell of it.

        Raises:
            EndOfChat: it says so.
            LoraServeError: it cannot be done.
        """
        name, _, rest = line.strip().partition(" ")
        if name not in COMMANDS:
            raise ConfigError(
                f"{name} is no command{did_you_mean(name, COMMANDS)}; /help lists them. To begin a "
                "message with a slash, put a space before it"
            )
        return COMMANDS[name].act(self, rest.strip())

    def complete(self, line: str) -> Sequence[str]:
        """What this beginning of a line may become."""
        name, space, rest = line.partition(" ")
        if not space:
            return [f"{each} " for each in COMMANDS if each.startswith(line)] if line else []
        if name != "/adapter":
            return []
        names = [one.name for one in self._remote.models()]
        return [f"{name} {one}" for one in names if one.startswith(rest) and one.isprintable()]

    def use(self, name: str) -> str:
        """Ask this model or adapter from now on; without a name, tell which there are."""
        models = self._remote.models()
        if not name:
            return "\n".join(self._shown(each) for each in models)
        names = [each.name for each in models]
        if name not in names:
            raise ConfigError(
                f"{name} is not served{did_you_mean(name, names)}; /adapter lists what is"
            )
        self._conversation.use_model(name)
        return f"asking {name}"

    def _shown(self, model: ServedModel) -> str:
        kind = "adapter" if model.is_adapter else "model"
        return f"{'*' if model.name == self._conversation.model else ' '} {model.name} ({kind})"

    def tell_system(self, text: str) -> str:
        self._conversation.system = text or None
        return "the system message is set" if text else "there is no system message"

    def forget(self, _: str) -> str:
        self._conversation.forget()
        return "the conversation is forgotten"

    def set(self, text: str) -> str:
        """Change a setting, or show all."""
        name, _, value = text.partition(" ")
        if name:
            self._conversation.set(name, value.strip())
        settings = self._conversation.settings
        return ", ".join(f"{key} {value!r}" for key, value in settings.items()) or (
            "all settings are the server's own"
        )

    def save(self, text: str) -> str:
        if not text:
            raise ConfigError("name a file: /save FILE")
        path = Path(text).expanduser()
        self._conversation.save(path)
        return f"saved {len(self._conversation.messages)} messages in {path}"

    def help(self, _: str) -> str:
        width = max(len(f"{name} {each.argument}") for name, each in COMMANDS.items())
        lines = [
            f"{f'{name} {each.argument}':{width}}  {each.help}" for name, each in COMMANDS.items()
        ]
        return "\n".join(
            [
                *lines,
                'A message of several lines stands between """ and """, or its lines end in \\.',
                "Ctrl-C stops an answer, Ctrl-D ends the chat.",
            ]
        )

    def quit(self, _: str) -> str:
        raise EndOfChat


COMMANDS: Mapping[str, Command] = {
    "/adapter": Command(
        "[NAME]", "ask this adapter or model; without a name: list them", ChatCommands.use
    ),
    "/system": Command(
        "[TEXT]", "put this system message first; without a text: none", ChatCommands.tell_system
    ),
    "/set": Command(
        "[FIELD [VALUE]]",
        "as in /set temperature 0.7; without a value: as the server has it",
        ChatCommands.set,
    ),
    "/reset": Command("", "forget the conversation", ChatCommands.forget),
    "/save": Command("FILE", "write the conversation as JSON", ChatCommands.save),
    "/help": Command("", "show this", ChatCommands.help),
    "/quit": Command("", "end the chat", ChatCommands.quit),
}
