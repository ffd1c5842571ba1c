"""What conversations ask for beyond their messages: routes, tools, turns; and bodies that say so.

The template here writes tools, calls and reasoning in a few tokens, so that small pools hold them.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec.structs import replace

from lora_serve.demo.corpus import LABEL_REQUESTS
from lora_serve.fuzz.trace import Ask, Chat, Route, Talk
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

Json = dict[str, Any]

TALKS_SHARE = 0.25  # of the requests
TOOLS: dict[str, Json] = {
    "look": {"at": {"enum": ["sea", "sky", "letters"]}},
    "walk": {"to": {"enum": ["town", "hill"]}, "steps": {"type": "integer"}},
    "wait": {},
}
TEMPLATE = (  # its markers are what `auto` parsers know hermes's calls and qwen3's reasoning by
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CALLS = (
    r'<tool_call>\{"name": "look", "arguments": \{"at": "(sea|sky)"\}\}</tool_call>',
    r'<tool_call>\{"name": "walk", "arguments": \{"to": "[a-z]{1,9}", "steps": [1-9]\}\}'
    "</tool_call>",
)
ANSWERS = tuple(  # reasoning, then a text or calls
    StructuredOutput.of(regex=f"(<think>[a-z ]{{1,20}}</think>)?({rest})")
    for rest in ("[a-z ]{1,30}", "|".join(_CALLS), f"[a-z]{{1,9}} {_CALLS[0]}{_CALLS[1]}")
)
_NO_RULES: Json = {"allowed_token_ids": None, "bad_words": ()}  # they may leave a grammar nothing
_NO_SCORES: Json = {
    "prompt_logprobs": None,
    "prompt_logprob_start": 0,
    "prompt_logprobs_last_n": None,
}


UNSAID = ("min_p", "repetition_penalty")  # settings of models that /v1/messages cannot ask for


class TalkWriter:
    """Lets some of a trace's requests become conversations with tools, or of other routes."""

    def __init__(self, seed: int, marks_reasoning: bool = False) -> None:
        """marks_reasoning: as of `Scope`."""
        self._rng = Random(f"talks {seed}")
        self._budget_rng = Random(f"budgets {seed}") if marks_reasoning else None
        self._labels: list[str] = []

    def draw(self, ask: Ask) -> Ask:
        rng = self._rng
        if rng.random() >= TALKS_SHARE:
            return ask
        talk = self._talk(rng.choice(("chat", "chat", "responses", "responses", "messages")))
        forces = bool(talk.tools) and talk.tool_choice not in ("auto", "none")
        params = replace(ask.params, **_NO_SCORES, structured_outputs=None)
        holds = not forces and rng.random() < 0.7
        if forces or holds:
            answer = rng.choice(ANSWERS) if holds else None
            params = replace(params, **_NO_RULES, structured_outputs=answer)
        params = replace(params, thinking_token_budget=self._budget())
        return replace(
            ask,
            prompt=Chat((("user", rng.choice(LABEL_REQUESTS)),)),
            params=_params_for(talk, params),
            pooling=None,
            talk=talk,
        )

    def _budget(self) -> int | None:
        rng = self._budget_rng
        return rng.choice((None, 0, 1, 5, 20)) if rng is not None else None

    def _talk(self, route: Route) -> Talk:
        rng = self._rng
        tools = tuple(rng.sample(sorted(TOOLS), k=rng.choice((0, 1, 2, 3))))
        choices = ("auto", "auto", "none", "required", *tools[:1])
        talk = Talk(
            route=route,
            tools=tools,
            tool_choice=rng.choice(choices) if tools else "auto",
            parallel_calls=rng.random() < 0.8,
        )
        if route != "responses" or rng.random() < 0.2:
            return talk
        if self._labels and rng.random() < 0.6:
            return replace(talk, continues=rng.choice(self._labels[-4:]))
        self._labels.append(f"response {len(self._labels)}")
        return replace(talk, stored_as=self._labels[-1])


def _params_for(talk: Talk, params: SamplingParams) -> SamplingParams:
    """The settings that the route can say. What may be continued leaves room for that."""
    if talk.route == "chat":
        return params
    short = min(params.max_tokens or 1, 48)
    if talk.route == "responses":
        return replace(params, n=1, max_tokens=short)
    return SamplingParams(
        max_tokens=short,
        temperature=min(params.temperature, 1.0),
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop=params.stop,
    )


# ── bodies ──────────────────────────────────────────────────────────────────────────────────


def schema(tool: str) -> Json:
    """The parameters of one of TOOLS."""
    properties = TOOLS[tool]
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def chat_fields(talk: Talk) -> Json:
    """What a chat's body has besides."""
    fields: Json = {"parallel_tool_calls": talk.parallel_calls}
    if talk.tools:
        functions = [{"name": name, "parameters": schema(name)} for name in talk.tools]
        fields["tools"] = [{"type": "function", "function": one} for one in functions]
        named = {"type": "function", "function": {"name": talk.tool_choice}}
        fields["tool_choice"] = named if talk.tool_choice in talk.tools else talk.tool_choice
    return fields


def response_body(ask: Ask, talk: Talk, settings: Json) -> Json:
    """settings: the parameters as bodies have them."""
    assert isinstance(ask.prompt, Chat), "a response continues a conversation"
    left_out = {*_NO_SCORES, "n", "max_tokens"}
    fields = {name: value for name, value in settings.items() if name not in left_out}
    if "response_format" in fields:
        constraint = fields.pop("response_format")
        fields["text"] = {"format": constraint | constraint.pop("json_schema", {})}
    if ask.params.logprobs is not None:
        fields["include"] = ["message.output_text.logprobs"]
        fields["top_logprobs"] = ask.params.logprobs
    if talk.tools:
        fields["tools"] = [
            {"type": "function", "name": name, "parameters": schema(name)} for name in talk.tools
        ]
        named = {"type": "function", "name": talk.tool_choice}
        fields["tool_choice"] = named if talk.tool_choice in talk.tools else talk.tool_choice
    return fields | {
        "input": turns(ask.prompt),
        "max_output_tokens": ask.params.max_tokens,
        "parallel_tool_calls": talk.parallel_calls,
        "return_token_ids": True,
        "store": bool(talk.stored_as),
        "stream": ask.is_streamed,
    }


def message_body(ask: Ask, talk: Talk) -> Json:
    assert isinstance(ask.prompt, Chat), "a message continues a conversation"
    params = ask.params
    fields: Json = {
        "messages": turns(ask.prompt),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop_sequences": list(params.stop),
        "stream": ask.is_streamed,
    }
    if talk.tools:
        fields["tools"] = [{"name": name, "input_schema": schema(name)} for name in talk.tools]
        kind = {"required": "any"}.get(talk.tool_choice, talk.tool_choice)
        choice: Json = {"type": "tool", "name": kind} if kind in talk.tools else {"type": kind}
        if not talk.parallel_calls:
            choice["disable_parallel_tool_use"] = True
        fields["tool_choice"] = choice
    return fields


def turns(prompt: Chat) -> list[Json]:
    return [{"role": role, "content": text} for role, text in prompt.messages]
