from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.pooling import PoolingParams
from lora_serve.text.sentence_transformers import checkpoint_pooling

MODELS = "sentence_transformers.models."


def checkpoint(directory: Path, kinds: list[str], pooling: dict[str, object]) -> str:
    """A directory as sentence-transformers saves one, without the model."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{MODELS}{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(directory)


def test_a_checkpoint_that_says_nothing_gives_the_last_token_normalised(tmp_path: Path) -> None:
    assert checkpoint_pooling(str(tmp_path)) == PoolingParams()


@pytest.mark.parametrize(
    ("config", "pooling_type"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "MEAN"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "LAST"),
        ({"pooling_mode": "lasttoken"}, "LAST"),
        ({"pooling_mode": "mean"}, "MEAN"),
        ({"word_embedding_dimension": 64}, "MEAN"),
    ],
)
@pytest.mark.parametrize("normalizes", [False, True])
def test_modules_json_says_how_embeddings_are_made(
    tmp_path: Path, config: dict[str, object], pooling_type: str, normalizes: bool
) -> None:
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    found = checkpoint_pooling(checkpoint(tmp_path, kinds, config))
    assert (found.pooling_type, found.normalize) == (pooling_type, normalizes)


@pytest.mark.parametrize(
    ("kinds", "config", "reason"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "lasttoken and mean_tokens",
        ),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_lasttoken": True}, "Dense"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_way_out(
    tmp_path: Path, kinds: list[str], config: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*--pooler-config"):
        checkpoint_pooling(checkpoint(tmp_path, kinds, config))


def test_a_broken_modules_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match="must hold a list of objects"):
        checkpoint_pooling(str(tmp_path))
