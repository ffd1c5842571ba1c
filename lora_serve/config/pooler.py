"""--pooler-config: vLLM's JSON of how embeddings are made, as PoolingParams."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lora_serve.errors import ConfigError
from lora_serve.pooling import PoolingParams, SequencePoolingType


class _PoolerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of vLLM's keys; the two of a line mean the same."""

    pooling_type: SequencePoolingType | None = None
    seq_pooling_type: SequencePoolingType | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    task: Literal["embed"] | None = None
    enable_chunked_processing: bool = False


def parse_pooler_config(text: str) -> PoolingParams:
    """What is not named is as without the flag and without a checkpoint that says anything.

    Raises:
        ConfigError: naming the key that is unknown, or whose value is none of its own.
    """
    try:
        given = msgspec.json.decode(text, type=_PoolerConfig)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"--pooler-config {text[:80]}: {error}; this server knows "
            f"{', '.join(_PoolerConfig.__struct_fields__)}"
        ) from error
    if given.enable_chunked_processing:
        raise ConfigError(
            "--pooler-config: enable_chunked_processing is not supported: an input longer than the "
            "model's context is refused; leave it out"
        )
    normalizes = [each for each in (given.normalize, given.use_activation) if each is not None]
    return PoolingParams(
        pooling_type=given.pooling_type or given.seq_pooling_type or "LAST",
        normalize=all(normalizes),
        dimensions=given.dimensions,
    )
