"""Whatever the two files hold: a checkpoint, or an error for the caller."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.errors import AdapterError, AdapterNotFoundError
from tests.fakes.adapter_files import header_of, lora_tensors, peft_config, safetensors_bytes

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.mlp.up_proj": (12, 8)}
TENSORS = lora_tensors(MODULES, rank=2)
CONFIG = json.dumps(peft_config({"r": 2})).encode()
WEIGHTS = safetensors_bytes(TENSORS)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*peft_config(), "use_dora", "init_lora_weights", "modules_to_save"])
PATTERNS = st.dictionaries(st.text("qproj_.*+?()[]{}|\\^$19,-", max_size=12), st.integers(1, 3))


def outcome(config: bytes, weights: bytes) -> str:
    """How reading ends; any other exception than these fails the test."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "adapter_config.json").write_bytes(config)
        Path(directory, "adapter_model.safetensors").write_bytes(weights)
        try:
            checkpoint = read_adapter(directory, lora_modules=MODULES, max_lora_rank=4)
        except (AdapterError, AdapterNotFoundError) as error:
            str(error).encode()  # it can be sent
            return "refused"
        assert {module.name for module in checkpoint.modules} <= set(MODULES)
        return "read"


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with some replaced, cut out or put in."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 8)))
        data[at:until] = draw(st.binary(max_size=8))
    return bytes(data)


def test_the_unharmed_files_are_read() -> None:
    assert outcome(CONFIG, WEIGHTS) == "read"


@settings(max_examples=150, deadline=None)
@given(mutated(CONFIG))
def test_harmed_configs_end_in_a_checkpoint_or_an_error(config: bytes) -> None:
    outcome(config, WEIGHTS)


@settings(max_examples=150, deadline=None)
@given(mutated(WEIGHTS))
def test_harmed_weights_end_in_a_checkpoint_or_an_error(weights: bytes) -> None:
    outcome(CONFIG, weights)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_random_bytes_are_refused(config: bytes, weights: bytes) -> None:
    assert outcome(config, weights) == "refused"


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, JSON, min_size=1, max_size=3), PATTERNS)
def test_settings_of_any_type_end_in_a_checkpoint_or_an_error(
    changed: dict[str, object], patterns: dict[str, int]
) -> None:
    config = peft_config({"r": 2, "rank_pattern": patterns} | changed)
    assert outcome(json.dumps(config).encode(), WEIGHTS) in ("read", "refused")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TENSORS)), st.sampled_from(["dtype", "shape", "data_offsets"]), JSON)
def test_headers_of_any_type_end_in_an_error(name: str, key: str, value: object) -> None:
    header = header_of(TENSORS.items())
    header[name] = {**header[name], key: value}  # type: ignore[dict-item]
    assert outcome(CONFIG, safetensors_bytes(TENSORS, header)) == "refused"
