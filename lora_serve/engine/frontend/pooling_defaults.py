"""How embeddings are made where a request says nothing of it."""

from __future__ import annotations

from lora_serve.config import ModelConfig
from lora_serve.config.pooler import parse_pooler_config
from lora_serve.pooling import PoolingParams
from lora_serve.text.sentence_transformers import checkpoint_pooling


def pooling_defaults(config: ModelConfig) -> PoolingParams:
    """What --pooler-config says; without it, what the checkpoint says.

    Raises:
        ConfigError: the checkpoint asks for what this server does not compute.
    """
    if config.pooler_config is not None:
        return parse_pooler_config(config.pooler_config)
    return checkpoint_pooling(config.model, config.revision)
