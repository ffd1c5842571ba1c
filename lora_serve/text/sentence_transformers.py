"""How a checkpoint that sentence-transformers wrote says that embeddings are made of its model.

`modules.json` lists what follows the model; the pooling module has a config of its own. A
checkpoint without the file says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.errors import ConfigError
from lora_serve.pooling import LAST_NORMALISED, PoolingParams, SequencePoolingType
from lora_serve.text.generation_config import read_json_file, read_model_json

_REMEDY = """give --pooler-config '{"pooling_type": "LAST"}' to leave modules.json aside"""
_DEFAULT_MODE = "mean"
_MODE_KEY = "pooling_mode"
_POOLING_TYPES: Mapping[str, SequencePoolingType] = {
    "lasttoken": "LAST",
    "mean": "MEAN",
    "mean_tokens": "MEAN",
}


def checkpoint_pooling(source: str, revision: str | None = None) -> PoolingParams:
    """What the model's modules.json asks for; the last token, normalised, without such a file.

    Args:
        source: a directory or a hub id.

    Raises:
        ConfigError: it asks for what this server does not compute.
    """
    modules = read_json_file(source, revision, "modules.json")
    if modules is None:
        return LAST_NORMALISED
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"modules.json of {source} must hold a list of objects; {_REMEDY}")
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in modules}
    unknown = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise ConfigError(
            f"modules.json of {source} asks for {', '.join(sorted(unknown))}, which this server "
            f"does not compute; {_REMEDY}"
        )
    pooling_type: SequencePoolingType = "LAST"
    if "Pooling" in kinds:
        path = f"{kinds['Pooling'].get('path')}/config.json"
        pooling_type = _pooling_type(source, path, read_model_json(source, revision, path))
    return PoolingParams(pooling_type=pooling_type, normalize="Normalize" in kinds)


def _pooling_type(source: str, path: str, config: Mapping[str, object]) -> SequencePoolingType:
    prefix = f"{_MODE_KEY}_"
    modes = [
        key.removeprefix(prefix)
        for key, value in config.items()
        if key.startswith(prefix) and value is True
    ]
    named = config.get(_MODE_KEY)
    modes += [named] if isinstance(named, str) else []
    pooling_type = _POOLING_TYPES.get(modes[0] if modes else _DEFAULT_MODE)
    if len(modes) > 1 or pooling_type is None:
        raise ConfigError(
            f"{path} of {source} asks for the pooling {' and '.join(modes)}; this server knows "
            f"lasttoken and mean; {_REMEDY}"
        )
    return pooling_type
