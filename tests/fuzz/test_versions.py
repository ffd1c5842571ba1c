from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint import own_shapes, read_adapter
from lora_serve.errors import ConfigError
from lora_serve.fuzz.versions import (
    INVOCATION,
    write_activated,
    write_extended,
    write_versions,
)
from lora_serve.model_info import Vocabulary
from tests.fakes.checkpoints import whole_checkpoint


def test_no_two_versions_are_alike_and_activated_ones_wait_for_tokens_of_traces(
    adapter_paths: list[Path], tmp_path: Path
) -> None:
    own = tmp_path / "own"
    (plain,) = write_versions(adapter_paths[:1], tmp_path / "plain")[:1]
    plain.rename(own)
    config = json.loads((own / "adapter_config.json").read_text())
    (own / "adapter_config.json").write_text(
        json.dumps(config | {"alora_invocation_tokens": [90, 91, 92]})
    )
    library = tmp_path / "library"
    vocabulary = Vocabulary("model.embed_tokens", "lm_head", 100, 8, is_tied=True)
    paths = (
        *write_versions([adapter_paths[1], own], library),
        write_activated(own, library),
        write_extended(own, vocabulary, EXPERTS, library),
    )
    read = []
    for path in map(str, paths):
        modules, found = own_shapes(path)
        checkpoint = read_adapter(path, lora_modules=modules, max_lora_rank=64, vocabulary=found)
        read.append(checkpoint)
    assert len({each.digest for each in read}) == 8
    extended = read[-1].tensor_fields
    assert extended == whole_checkpoint().tensor_fields, "the fuzzer writes no such adapter"
    assert [each.invocation_tokens for each in read] == [()] * 3 + [INVOCATION] * 4 + [()]
    again = write_extended(paths[-1], vocabulary, EXPERTS, tmp_path / "again")
    assert own_shapes(str(again)) == own_shapes(str(paths[-1]))
    assert EXPERTS.keys() <= {module.name for module in read[-1].modules}
    assert [len(rows.token_ids or ()) for rows in read[-1].token_rows] == [25, 34]


EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{name}": (8, 16)
    for expert in range(3)
    for name in ("gate_proj", "up_proj")
}


@pytest.mark.parametrize("content", ["[]x", "3", "[1]"])
def test_an_adapter_that_cannot_be_read_is_told(
    adapter_paths: list[Path], tmp_path: Path, content: str
) -> None:
    (broken,) = write_versions(adapter_paths[:1], tmp_path / "copies")[:1]
    (broken / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match="no adapter can be read there"):
        write_versions([broken], tmp_path / "library")
