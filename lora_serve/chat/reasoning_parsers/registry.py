"""The table of formats of reasoning, by vLLM's names. A format is a line here."""

from __future__ import annotations

from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat

THINK, END_THINK = "<think>", "</think>"

# In this order templates are looked at.
REASONING_FORMATS = (
    ReasoningFormat(
        "mistral",
        begins=("[THINK]",),
        ends=("[/THINK]",),
        special_tokens=("[THINK]", "[/THINK]"),
        in_template="[THINK]",
    ),
    ReasoningFormat(
        "granite",
        begins=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        in_template="Here is my thought process:",
    ),
    ReasoningFormat(
        "qwen3",
        begins=(THINK,),
        ends=(END_THINK,),
        special_tokens=(THINK, END_THINK),
        in_template=END_THINK,
    ),
    ReasoningFormat(
        "deepseek_r1",
        begins=(THINK,),
        ends=(END_THINK,),
        special_tokens=(THINK, END_THINK),
    ),
)
