"""How a cold engine's answers to conversations are asked for and read: each choice for itself.

Prompts, grammars and formats are the server's own; each text is read whole, by a new parser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from pydantic import TypeAdapter

from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.parts import CallArguments, CallBegin, Content, Reasoning
from lora_serve.chat.token_kinds import Kind
from lora_serve.chat.tools import ToolChoice
from lora_serve.config import ServerConfig
from lora_serve.fuzz.answers import Choice
from lora_serve.fuzz.talk_answers import as_object
from lora_serve.fuzz.talks import UNSAID, schema, turns
from lora_serve.fuzz.trace import Ask, Chat, Talk
from lora_serve.llm import LLM
from lora_serve.outputs import CompletionOutput, RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.http.listener import read_template
from lora_serve.server.openai.chat_formats import ChatFormats
from lora_serve.server.openai.inputs import ENDING_CHARS
from lora_serve.server.openai.protocol import ChatBody
from lora_serve.server.openai.told_tokens import ToldTokens, token_kinds
from lora_serve.server.openai.tool_choice import answer_format, forced_calls
from lora_serve.server.openai.tool_fields import FunctionBody, ToolBody
from lora_serve.server.openai.usage import UsageCounter
from lora_serve.server.responses.items import InputItems, chat_messages
from lora_serve.step import TokenLogprobs

_ITEMS = TypeAdapter[Any](InputItems)
_STATUSES = {"length": "incomplete"}


@dataclass(frozen=True, slots=True)
class ColdChat:
    """A conversation as the engine is asked it. ending: of the prompt, as text."""

    prompt: TokensPrompt
    ending: str
    params: SamplingParams
    form: AnswerFormat


class ColdChats:
    """Conversations with one model, under the flags of one server."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._llm = llm
        self._template = read_template(config.chat_template)
        self._formats = ChatFormats(config, llm.tokenizer, self._template)
        knows_own = llm.config.model.generation_config != "none"
        self._own_settings = llm.tokenizer.generation_defaults if knows_own else {}

    def plan(self, ask: Ask, history: Sequence[object]) -> ColdChat:
        """history: items of /v1/responses that stand before the messages."""
        assert isinstance(ask.prompt, Chat), "only conversations are written by templates"
        tokenizer, body = self._llm.tokenizer, _body(ask.talk or Talk())
        source = tokenizer.template_source(self._template)
        items = _ITEMS.validate_python([*history, *turns(ask.prompt)])
        text = tokenizer.render_chat(
            [message.past(iter(())).plain(source) for message in chat_messages(items, None)],
            chat_template=self._template,
            tools=[tool.tool.plain for tool in body.tools or ()] or None,
        )
        form = answer_format(body, self._formats.of(self._template))
        params, ending = self._settings(ask), text[-ENDING_CHARS:]
        if (forced := forced_calls(body, form)) is not None:
            params = replace(params, structured_outputs=forced)
        waits = not self._llm.config.structured_outputs.structured_outputs_enable_in_reasoning
        if form.reasoning is not None and params.needs_reasoning(grammars_wait=waits):
            tokens = form.reasoning.tokens(self._llm._encode, ending)
            params = replace(params, reasoning=tokens)
            is_constrained = tokens is not None and params.structured_outputs is not None
            form = dataclasses.replace(form, grammar_waits=is_constrained)
        return ColdChat(TokensPrompt(tuple(self._llm._encode(text))), ending, params, form)

    def _settings(self, ask: Ask) -> SamplingParams:
        """The request's, and the model's own where the route has no field for them."""
        if ask.talk is None or ask.talk.route != "messages":
            return ask.params
        unsaid = {name: self._own_settings[name] for name in UNSAID if name in self._own_settings}
        return replace(ask.params, **unsaid)

    def output(self, chat: ColdChat, lora_name: str | None) -> RequestOutput:
        """Like `LLM.generate`, with the special tokens that mark parts of the answer."""
        ids = map(self._llm.tokenizer.special_token_id, chat.form.special_tokens)
        shown = tuple(token_id for token_id in ids if token_id is not None)
        job = self._llm._job(chat.prompt, chat.params, None, lora_name, 0, "")
        request = replace(job.message.request, shown_special_tokens=shown)
        message = replace(job.message, request=request)
        (output,) = self._llm._engine.run([dataclasses.replace(job, message=message)])
        return output

    def told_logprobs(
        self, ask: Ask, chat: ColdChat, choice: CompletionOutput
    ) -> Sequence[TokenLogprobs]:
        """The logprobs that the route tells: in responses they are parts of messages alone."""
        if ask.talk is None or ask.talk.route != "responses":
            return choice.logprobs
        kinds = token_kinds(
            chat.form,
            chat.ending,
            self._llm.tokenizer,
            skip_special_tokens=chat.params.skip_special_tokens,
            finds_calls=True,
        )
        return ToldTokens(kinds, UsageCounter(b"", []), {Kind.CONTENT}).of(choice.delta).logprobs

    def read(self, ask: Ask, chat: ColdChat, output: CompletionOutput, choice: Choice) -> None:
        """Make of a choice with the text of all its tokens what the route tells."""
        items = self._items(chat, output)
        has_calls = any(item[0] == "call" for item in items)
        match ask.talk.route if ask.talk is not None else "chat":
            case "chat":
                choice.text = "".join(text for kind, *_, text in items if kind == "message")
                choice.items = [item for item in items if item[0] == "reasoning"]
                choice.items += [item for item in items if item[0] == "call"]
                if has_calls and choice.finish_reason == "stop" and chat.form.called is None:
                    choice.finish_reason = "tool_calls"
            case "responses":
                choice.text, choice.stop_reason = "", None
                choice.items = items or [["message", ""]]
                choice.finish_reason = _STATUSES.get(choice.finish_reason or "", "completed")
            case "messages":
                _end_message(choice, items)
                if not ask.is_streamed:
                    for item in items:
                        item[-1] = as_object(item[-1]) or "{}" if item[0] == "call" else item[-1]

    def _items(self, chat: ColdChat, output: CompletionOutput) -> list[list[str]]:
        """The parts of one text, in order; neighbours of a kind are one."""
        tools = chat.form.tools
        are_short = tools is not None and tools.has_short_ids
        ids = CallIds(chat.prompt.token_ids, are_short=are_short)
        parser, items = chat.form.parser(chat.ending), list[list[str]]()
        for part in (*parser.feed(output.text), *parser.finish()):
            match part:
                case CallBegin(index, name):
                    items.append(["call", ids.id_of(output.index, index, name), name, ""])
                case CallArguments(_, text):
                    items[-1][-1] += text
                case Content(text) | Reasoning(text):
                    kind = "message" if isinstance(part, Content) else "reasoning"
                    if not items or items[-1][0] != kind:
                        items.append([kind, ""])
                    items[-1][-1] += text
        return items


def _end_message(choice: Choice, items: list[list[str]]) -> None:
    """Say as Anthropic's API does why an answer ended; it tells neither tokens nor logprobs."""
    calls = [item for item in items if item[0] == "call"]
    stop = choice.stop_reason
    choice.text, choice.token_ids, choice.logprobs, choice.items = "", [], [], items
    choice.stop_reason = None
    if choice.finish_reason == "length":
        choice.finish_reason = "max_tokens"
    elif isinstance(stop, str) and not (calls and as_object(calls[-1][-1])):
        choice.finish_reason, choice.stop_reason = "stop_sequence", stop
    else:
        choice.finish_reason = "tool_use" if calls else "end_turn"


def _body(talk: Talk) -> ChatBody:
    """What tools and the choice among them are, as the server's code takes it."""
    functions = [FunctionBody(name=name, parameters=schema(name)) for name in talk.tools]
    named = talk.tool_choice in talk.tools
    mode: Any = "named" if named else talk.tool_choice
    return ChatBody.model_construct(
        messages=[],
        tools=[ToolBody(type="function", function=one) for one in functions] or None,
        tool_choice=ToolChoice(mode, talk.tool_choice if named else None),
        parallel_tool_calls=talk.parallel_calls,
    )
