from __future__ import annotations

import logging
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GgmlType

from lora_serve.config import ModelConfig
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.loaded_model import load_model
from tests.fakes.gguf_files import save_gguf
from tests.fakes.quantized_checkpoints import Written, fp8, gptq, save_quantized
from tests.fakes.tiny_models import ALL_MODELS, ONE_LAYER, save


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (fp8(None), ["FP8 (F32, FP8): no codes are kept; weights are dequantised to float32"]),
        (
            gptq(4, 32),
            ["GPTQ (F32, GPTQ): codes are kept of 7 matrices of GPTQ; the others are floats"],
        ),
        (None, []),
    ],
    ids=["fp8", "gptq", "floats"],
)
def test_the_log_says_what_became_of_codes(
    how: Written | None, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, directory = ALL_MODELS[ONE_LAYER].make(), tmp_path / "model"
    if how is None:
        save(model, directory)
    else:
        save_quantized(model, directory, how)
    named = None if how is None else how.settings["quant_method"]  # which changes nothing
    with caplog.at_level(logging.INFO, "lora_serve.worker.loaded_model"):
        load_model(ModelConfig(model=str(directory), quantization=named), CpuDevice(), 16)
    assert [r.getMessage() for r in caplog.records if "codes" in r.getMessage()] == told


def test_a_tied_lm_head_keeps_the_codes_of_the_embeddings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ALL_MODELS[ONE_LAYER].make()
    assert model.config.tie_word_embeddings
    file = save_gguf(model, tmp_path / "m.gguf", lambda _: GgmlType.Q8_0)
    with caplog.at_level(logging.INFO, "lora_serve.worker.loaded_model"):
        load_model(ModelConfig(model=str(file), tokenizer=str(file)), CpuDevice(), 16)
    told = "GGUF (F32, Q8_0): codes are kept of 8 matrices of Q8_0; the others are floats"
    assert told in caplog.messages


def test_the_log_tells_the_matrices_of_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantized(ALL_MODELS["olmoe"].make(), tmp_path / "model", gptq(4, 32))
    with caplog.at_level(logging.INFO, "lora_serve.worker.loaded_model"):
        model = load_model(ModelConfig(model=str(tmp_path / "model")), CpuDevice(), 16)
    told = "codes are kept of 38 matrices of GPTQ (30 of experts); the others are floats"
    assert f"GPTQ (F32, GPTQ): {told}" in caplog.messages
    assert model.weights == "GPTQ (F32, GPTQ), codes kept of GPTQ"
