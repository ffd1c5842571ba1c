"""Which clients are tried: what is installed for each, and which of the scripts is run in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
NODE = "node@24"  # what the packages ask for, whatever the machine has


@dataclass(frozen=True, slots=True)
class Client:
    """packages: of PyPI, or of npm for a script of Node's; the first one names the version."""

    name: str
    script: str
    packages: tuple[str, ...]

    @property
    def is_for_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai, Python", "openai_python.py", ("openai",)),
    Client("openai, Node", "openai_node.mjs", ("openai@7", "zod")),
    Client("anthropic, Python", "anthropic_python.py", ("anthropic",)),
    Client("anthropic, Node", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Client("litellm", "litellm_python.py", ("litellm", "mcp")),
    Client("langchain, Python", "langchain_python.py", ("langchain-openai",)),
    Client("langchain, Node", "langchain_node.mjs", ("@langchain/openai", "@langchain/core")),
    Client(
        "llama-index",
        "llama_index_python.py",
        ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
    Client("instructor", "instructor_python.py", ("instructor",)),
    Client("pydantic-ai", "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("openai-agents", "openai_agents_python.py", ("openai-agents",)),
    Client("AI SDK", "ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible")),
    Client("autogen", "autogen_python.py", ("autogen-agentchat", "autogen-ext[openai]")),
    Client("smolagents", "smolagents_python.py", ("smolagents[openai]",)),
    Client("lm-eval", "lm_eval_python.py", ("lm-eval[api]",)),
    Client("guidellm", "guidellm_python.py", ("guidellm",)),
)
PATHS = (
    *(
        "start",
        "chat",
        "stream",
        "tools",
        "stream_tools",
        "structured",
        "completions",
        "loglikelihoods",
    ),
    *("responses", "stream_responses", "tools_responses", "structured_responses"),
    *("messages", "stream_messages", "count_tokens", "embeddings"),
    *("models", "adapter", "agent", "errors"),
)


def chosen_clients(names: Iterable[str]) -> list[Client]:
    """The clients whose name begins with one of the names; all if there is none.

    Raises:
        ValueError: a name is no client's.
    """
    names = list(names)
    for name in names:
        if not any(client.name.startswith(name) for client in CLIENTS):
            known = ", ".join(repr(client.name) for client in CLIENTS)
            raise ValueError(f"no client is called {name!r}; there are {known}")
    return [c for c in CLIENTS if not names or any(c.name.startswith(name) for name in names)]
