"""SmolLM2 with its real weights: a GGUF file of others' making, beside transformers and gguf."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from lora_serve.config.model import AUTO
from lora_serve.demo.server_process import ServerProcess
from lora_serve.demo.smollm2 import ensure_smollm2
from lora_serve.errors import ConfigError
from lora_serve.gguf.header import read_header
from lora_serve.llm import LLM
from lora_serve.models.source import load_spec
from lora_serve.models.weights import open_weights
from lora_serve.sampling_params import SamplingParams
from lora_serve.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TEXTS = (
    "The capital of France is",
    "def add(a, b):\n\treturn a + b  # 12345\n\n\n",
    " naïve café  e\u0301 — “quotes” don't I'LL 东京 🙂\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<file_sep>",
)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return ensure_smollm2(print)
    except ConfigError as error:
        warnings.warn(f"SmolLM2 is not to be had, so its tests are skipped: {error}", stacklevel=1)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def theirs(file: Path) -> PreTrainedModel:
    """The dequantised weights in float32, as transformers reads them."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
    )


@pytest.fixture(scope="module")
def llm(file: Path) -> Iterator[LLM]:
    llm = LLM(str(file), dtype="float32", max_model_len=512)
    yield llm
    llm.close()


def test_the_tokenizer_is_that_of_transformers(file: Path) -> None:
    ours = Tokenizer(str(file))
    theirs: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), False) == theirs.decode(theirs.encode(text))
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert ours.eos_token_ids == (theirs.convert_tokens_to_ids("<|im_end|>"), 0)


def test_tensors_are_dequantised_to_the_bit(file: Path) -> None:
    source = open_weights(file, load_spec(file), AUTO, 0, torch.float32)
    entries = read_header(file).tensors
    for name, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.layers.29.post_attention_layernorm.weight", "blk.29.ffn_norm.weight"),
    ):
        entry = entries[theirs]
        raw = np.fromfile(file, np.uint8, entry.end - entry.begin, offset=entry.begin)
        rows = raw.reshape(*entry.shape[:-1], -1)
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[entry.type_name])
        np.testing.assert_array_equal(source.read(name).numpy(), expected)


@pytest.mark.slow
def test_answers_are_those_of_transformers_on_the_dequantised_weights(
    llm: LLM, theirs: PreTrainedModel
) -> None:
    """Rows of q and k that lay in another order would show here, which no tensor's bits do."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    for output in llm.chat([CHAT], params), llm.generate(TEXTS[:2], params):
        for each in output:
            answer = each.outputs[0]
            ids = torch.tensor([[*each.prompt_token_ids, *answer.token_ids]])
            with torch.inference_mode():
                logits = theirs(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]
            assert logits.argmax(-1).tolist() == answer.token_ids
            found = [step.logprob for step in answer.logprobs]
            expected = logits.log_softmax(-1)[range(len(found)), answer.token_ids]
            torch.testing.assert_close(torch.tensor(found), expected, atol=2e-3, rtol=0)


def test_its_first_answer_is_english(llm: LLM) -> None:
    (output,) = llm.chat([CHAT], SamplingParams(temperature=0, max_tokens=32))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert "Q4_1" in llm.model_info.weights


@pytest.mark.slow
def test_the_example_teaches_it_and_replaces_the_adapter_under_load(
    file: Path, tmp_path: Path
) -> None:
    flags = ("--enable-lora", "--max-model-len", "1024")
    with ServerProcess(file, flags, tmp_path / "log") as server:
        server.wait_until_healthy()
        example = [sys.executable, ROOT / "examples/opening_hours.py", "--url", server.base_url]
        done = subprocess.run(example, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "answers under load, by version:" in done.stdout
