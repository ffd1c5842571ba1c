"""The table of formats of tool calls, by vLLM's names, and which of them a chat template uses.

A format is a line here, and a `CallReader` if its syntax is new.
"""

from __future__ import annotations

from types import MappingProxyType

from lora_serve.chat.tool_parsers import deepseek_v3, mistral, pythonic
from lora_serve.chat.tool_parsers.deepseek_v3 import DeepSeekCalls
from lora_serve.chat.tool_parsers.json_calls import (
    CallList,
    CallSequence,
    PluginAction,
    TaggedCall,
)
from lora_serve.chat.tool_parsers.mistral import MistralCalls
from lora_serve.chat.tool_parsers.parser import ToolFormat
from lora_serve.chat.tool_parsers.pythonic import PythonicCalls
from lora_serve.chat.tool_parsers.qwen3_coder import Qwen3CoderCalls

PYTHON_TAG = "<|python_tag|>"
ACTION_START, PLUGIN = "<|action_start|>", "<|plugin|>"

# In this order templates are looked at: one that also fits a later line belongs to the first.
TOOL_FORMATS = (
    ToolFormat(
        "mistral",
        MistralCalls,
        markers=("[TOOL_CALLS]",),
        special_tokens=("[TOOL_CALLS]", mistral.ARGS, mistral.CALL_ID),
        in_template=(("[TOOL_CALLS]",),),
        has_short_ids=True,
    ),
    ToolFormat(
        "deepseek_v3",
        DeepSeekCalls,
        markers=(deepseek_v3.CALLS_BEGIN,),
        special_tokens=(
            deepseek_v3.CALLS_BEGIN,
            deepseek_v3.CALL_BEGIN,
            deepseek_v3.SEPARATOR,
            deepseek_v3.CALL_END,
            deepseek_v3.CALLS_END,
        ),
        in_template=((deepseek_v3.CALLS_BEGIN,),),
    ),
    ToolFormat(
        "qwen3_coder",
        Qwen3CoderCalls,
        markers=("<tool_call>",),
        special_tokens=("<tool_call>", "</tool_call>"),
        in_template=(("<tool_call>", "<function="),),
    ),
    ToolFormat(
        "granite",
        CallList,
        markers=("<|tool_call|>",),
        special_tokens=("<|tool_call|>",),
        in_template=(("<|tool_call|>",),),
    ),
    ToolFormat(
        "internlm",
        PluginAction,
        markers=(ACTION_START + PLUGIN,),
        special_tokens=(ACTION_START, PLUGIN, PluginAction.end),
        in_template=((ACTION_START + PLUGIN,),),
    ),
    ToolFormat(
        "hermes",
        TaggedCall,
        markers=("<tool_call>",),
        special_tokens=("<tool_call>", "</tool_call>"),
        in_template=(("<tool_call>",),),
    ),
    ToolFormat(
        "llama4_pythonic",
        PythonicCalls,
        markers=(pythonic.PYTHON_START,),
        opening="[",
        special_tokens=(pythonic.PYTHON_START, pythonic.PYTHON_END),
        in_template=((pythonic.PYTHON_START,), ("[func_name1(params_name1=",)),
    ),
    ToolFormat("pythonic", PythonicCalls, opening="["),
    ToolFormat(
        "llama3_json",
        CallSequence,
        markers=(PYTHON_TAG,),
        opening="{",
        special_tokens=(PYTHON_TAG,),
        in_template=((PYTHON_TAG,), ("<|start_header_id|>", '"parameters": ')),
    ),
)
# Names that vLLM has for what is one format here.
TOOL_ALIASES = MappingProxyType(
    {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "deepseek_v31": "deepseek_v3"}
)
