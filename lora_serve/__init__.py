"""lora-serve: LLM serving with many LoRA adapters, exact whatever was cached.

What users import stands here. It is loaded when it is asked for: `import lora_serve` alone takes no
time, and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_serve.errors import (
        AdapterChangedError,
        AdapterError,
        AdapterExistsError,
        AdapterFormatError,
        AdapterNotFoundError,
        AdapterUnavailableError,
        CatalogRefusedError,
        CatalogUnavailableError,
        ChangeUnknownError,
        ConfigError,
        EngineDeadError,
        ForbiddenError,
        GrammarUnavailableError,
        HubNotAllowedError,
        InvalidRequestError,
        KVLoadError,
        LoraServeError,
        NotForgottenError,
        NotFoundError,
        OverloadedError,
        PauseEndedError,
        PromptTooLongError,
        RankLostError,
        RequestAbortedError,
        RequestFailedError,
        SlowReaderError,
        UnauthorizedError,
    )
    from lora_serve.llm import LLM
    from lora_serve.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
    from lora_serve.pooling import PoolingParams
    from lora_serve.prompts import EmbedsPrompt, MixedPrompt, TokensPrompt
    from lora_serve.sampling_params import SamplingParams
    from lora_serve.structured_outputs import StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterChangedError",
    "AdapterError",
    "AdapterExistsError",
    "AdapterFormatError",
    "AdapterNotFoundError",
    "AdapterUnavailableError",
    "CatalogRefusedError",
    "CatalogUnavailableError",
    "ChangeUnknownError",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbedsPrompt",
    "EngineDeadError",
    "ForbiddenError",
    "GrammarUnavailableError",
    "HubNotAllowedError",
    "InvalidRequestError",
    "KVLoadError",
    "LoraServeError",
    "MixedPrompt",
    "NotForgottenError",
    "NotFoundError",
    "OverloadedError",
    "PauseEndedError",
    "PoolingParams",
    "PromptTooLongError",
    "RankLostError",
    "RequestAbortedError",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "SlowReaderError",
    "StructuredOutput",
    "TokensPrompt",
    "UnauthorizedError",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "RequestOutput": "outputs",
    "PoolingParams": "pooling",
    "EmbedsPrompt": "prompts",
    "MixedPrompt": "prompts",
    "TokensPrompt": "prompts",
    "SamplingParams": "sampling_params",
    "StructuredOutput": "structured_outputs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
