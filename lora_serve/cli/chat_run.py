"""A run of `lora-serve chat`: finds or starts the server, then asks and shows."""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import ExitStack

from lora_serve.cli.chat_commands import ChatCommands, EndOfChat
from lora_serve.cli.chat_conversation import Conversation, NoTemplateError
from lora_serve.cli.chat_input import DIM, PLAIN, ChatInput, read_message
from lora_serve.cli.chat_stream import Answer
from lora_serve.cli.ending_signals import ended_by_signals
from lora_serve.cli.own_server import OwnServer
from lora_serve.cli.parser import did_you_mean
from lora_serve.cli.remote import Remote
from lora_serve.cli.server_arguments import DEFAULT_URL, chosen_key
from lora_serve.errors import ConfigError, LoraServeError
from lora_serve.observability.escapes import escaped

# What a terminal would take as an order, in a text that a model wrote: controls, line breaks of
# other kinds, changes of direction.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def run_chat(args: argparse.Namespace) -> int:
    """Chat until the input ends.

    Raises:
        LoraServeError: there is no server to ask; or, in a pipe, a question failed.
    """
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        own, url = _server(args, stack)
        remote = stack.enter_context(Remote(url, chosen_key(args, os.environ)))
        conversation = Conversation(remote, _first_model(remote, args.model), args.system)
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        chat = Chat(remote, conversation, own, is_interactive=is_interactive)
        return chat.run() if is_interactive else chat.run_piped()


class Chat:
    """Shows answers on stdout; in a pipe, all else goes to stderr."""

    def __init__(
        self,
        remote: Remote,
        conversation: Conversation,
        own: OwnServer | None,
        *,
        is_interactive: bool,
    ) -> None:
        self._remote = remote
        self._conversation = conversation
        self._own = own
        self._is_interactive = is_interactive
        self._commands = ChatCommands(remote, conversation)
        self._is_reasoning = False

    def run(self) -> int:
        """Until Ctrl-D or /quit."""
        reader = ChatInput(self._commands.complete)
        self._tell(f"{self._conversation.model} at {self._remote.url}; /help lists the commands")
        while True:
            try:
                if self._say(reader.read()):
                    return 0
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                self._tell("\nCtrl-D or /quit ends the chat")
            except LoraServeError as error:
                self._tell(f"error: {error}")
                if self._own is not None:
                    self._own.check()

    def run_piped(self) -> int:
        """A question a line, until the end of the input."""
        lines = iter(sys.stdin)
        while True:
            try:
                if self._say(read_message(lambda _: next(lines).rstrip("\n"))):
                    return 0
            except StopIteration:
                return 0

    def _say(self, message: str) -> bool:
        """Do what was typed; returns whether the chat is over."""
        if message.startswith("/"):
            try:
                self._tell(self._commands.run(message))
            except EndOfChat:
                return True
        elif message.strip():
            self._ask(message)
        return False

    def _ask(self, question: str) -> None:
        try:
            self._ask_once(question)
        except NoTemplateError:
            self._tell(
                f"{self._conversation.model} has no chat template: it continues your texts "
                "instead (/v1/completions)"
            )
            self._ask_once(question)

    def _ask_once(self, question: str) -> None:
        answer = Answer()
        try:
            self._conversation.ask(question, answer, self._show)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._end_line()
            self._tell("stopped" if answer.text else "stopped; the question is forgotten")
            return
        except LoraServeError:
            if answer.num_pieces:
                self._end_line()
            raise
        self._end_line()
        if self._is_interactive:
            self._tell(_told(answer))

    def _show(self, text: str, is_reasoning: bool) -> None:
        """Write a piece of an answer: reasoning dim, on a terminal only."""
        if sys.stdout.isatty():
            text = _CONTROLS.sub("", text)
        if not self._is_interactive:
            text = "" if is_reasoning else text
        else:
            if is_reasoning != self._is_reasoning:
                text = (DIM if is_reasoning else f"{PLAIN}\n") + text
        self._is_reasoning = is_reasoning
        sys.stdout.write(text)
        sys.stdout.flush()

    def _end_line(self) -> None:
        sys.stdout.write(f"{PLAIN if self._is_interactive else ''}\n")
        sys.stdout.flush()
        self._is_reasoning = False

    def _tell(self, text: str) -> None:
        text = escaped(text, kept="\n")
        if self._is_interactive:
            print(f"{DIM}{text}{PLAIN}")
        else:
            print(text, file=sys.stderr)


def _told(answer: Answer) -> str:
    """The line below an answer."""
    parts = [f"{answer.num_tokens or answer.num_pieces} tokens"]
    if answer.num_cached_tokens is not None:
        parts.append(
            f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached"
        )
    if answer.first_token_seconds is not None:
        parts.append(f"first token {answer.first_token_seconds * 1000:.0f} ms")
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("cut at its limit of tokens")
    return ", ".join(parts)


def _server(args: argparse.Namespace, stack: ExitStack) -> tuple[OwnServer | None, str]:
    """The server that was named, one that answers at the default address, or one of our own."""
    if args.url and args.serve_args:
        raise ConfigError(
            f"--url {args.url} names a server that runs, {args.serve_args[0]} a model to start one "
            "with; leave one out"
        )
    if args.url:
        return None, args.url
    arguments = args.serve_args
    if not arguments:
        with Remote(DEFAULT_URL, None) as remote:
            if remote.is_there():
                return None, DEFAULT_URL
        print(f"no server answers at {DEFAULT_URL}; starting one for this chat", file=sys.stderr)
        arguments = ["--enable-lora"]  # the demo's model is served, which has two adapters
    own = stack.enter_context(OwnServer(arguments))
    own.wait_until_ready()
    return own, own.url


def _first_model(remote: Remote, wanted: str | None) -> str:
    names = [model.name for model in remote.models()]
    if wanted is None and names:
        return names[0]
    if wanted not in names:
        raise ConfigError(
            f"--model {wanted}: {remote.url} serves {', '.join(names[:20]) or 'no model'}"
            f"{did_you_mean(wanted or '', names)}"
        )
    return wanted
