from __future__ import annotations

import pytest

from lora_serve.chat.formats import reasoning_format, tool_format
from lora_serve.errors import ConfigError

# What the families' own templates hold, and the formats of their answers.
TEMPLATES = {
    "Qwen 2.5": ('\'<tool_call>\\n{"name": "\'', "hermes", None),
    "Qwen 3": ("'<tool_call>\\n{\"name\": \"' content.split('</think>')", "hermes", "qwen3"),
    "Qwen 3 Coder": ("'<tool_call>\\n<function=' + name", "qwen3_coder", None),
    "Hermes 3": ("within <tool_call></tool_call> XML tags", "hermes", None),
    "Llama 3.1": ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "llama3_json", None),
    "Llama 3.2": (
        "'<|start_header_id|>' '{\"name\": \"' + tool_call.name + '\", ' '\"parameters\": '",
        "llama3_json",
        None,
    ),
    "Llama 4": ("'<|python_start|>'", "llama4_pythonic", None),
    "Mistral": ("'[TOOL_CALLS]'", "mistral", None),
    "Magistral": ("'[TOOL_CALLS]' '[THINK]'", "mistral", "mistral"),
    "Granite 3": (
        "<|tool_call|> Write your thoughts after 'Here is my thought process:'",
        "granite",
        "granite",
    ),
    "DeepSeek R1": ("<｜tool▁calls▁begin｜> content.split('</think>')", "deepseek_v3", "qwen3"),
    "InternLM 2.5": ("'<|action_start|><|plugin|>\\n' '{\"name\": \"'", "internlm", None),
    "Llama 2": ("[INST]", None, None),
}


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_tells_its_formats(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    tool, thought = tool_format("auto", template), reasoning_format("auto", template)
    assert (tool and tool.name, thought and thought.name) == (tools, reasoning)


def test_a_name_goes_before_the_template() -> None:
    assert tool_format("none", "<tool_call>") is None
    named, alias = tool_format("pythonic", "<tool_call>"), tool_format("qwen3_xml", "")
    assert named is not None
    assert named.name == "pythonic"
    assert alias is not None
    assert alias.name == "qwen3_coder"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser hermez must be one of auto, none, d"):
        tool_format("hermez", "")
    with pytest.raises(ConfigError, match="--reasoning-parser o1 must be one of auto, none, d"):
        reasoning_format("o1", "")
