from __future__ import annotations

import pytest

from lora_serve.config import ModelConfig
from lora_serve.config.pooler import parse_pooler_config
from lora_serve.errors import ConfigError
from lora_serve.pooling import PoolingParams


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", PoolingParams()),
        ('{"pooling_type": "MEAN"}', PoolingParams(pooling_type="MEAN")),
        ('{"seq_pooling_type": "LAST", "task": "embed"}', PoolingParams()),
        ('{"normalize": false}', PoolingParams(normalize=False)),
        (
            '{"use_activation": false, "dimensions": 4}',
            PoolingParams(normalize=False, dimensions=4),
        ),
        ('{"use_activation": true, "pooling_type": null}', PoolingParams()),
    ],
)
def test_vllms_names_are_known(text: str, expected: PoolingParams) -> None:
    assert parse_pooler_config(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"pooling_type": "CLS"}', "CLS"),
        ('{"pooling_typ": "LAST"}', "pooling_typ.*this server knows pooling_type"),
        ('{"normalize": 1}', "bool"),
        ('{"dimensions": 0}', ">= 1"),
        ('{"enable_chunked_processing": true}', "enable_chunked_processing is not supported"),
        ("[]", "object"),
        ("LAST", "malformed"),
        ("\ud800", "--pooler-config"),
    ],
)
def test_what_is_not_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)--pooler-config.*{reason}|{reason}"):
        ModelConfig(model="m", pooler_config=text)
