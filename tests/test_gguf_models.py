"""A GGUF file served: from its floats, from the codes that it holds, and quantised once more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.config.model import AUTO
from lora_serve.engine.frontend.startup_checks import check_startup
from lora_serve.errors import ConfigError
from lora_serve.llm import LLM
from lora_serve.models.source import load_spec
from lora_serve.models.weights import open_weights
from lora_serve.outputs import CompletionOutput
from lora_serve.sampling_params import SamplingParams
from lora_serve.text.tokenizer import Tokenizer
from tests.fakes.gguf_files import save_gguf

PROMPTS = ["hello", "The quick brown fox", "a b c d e f g"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def file(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model with its tokenizer, in 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return save_gguf(model, path, lambda name: GgmlType.Q8_0, tokenizer)


@pytest.fixture(scope="module")
def dequantised(file: Path, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, in safetensors."""
    directory = tmp_path_factory.mktemp("dequantised") / "model"
    shutil.copytree(model_path, directory)
    spec = load_spec(file)
    source = open_weights(file, spec, AUTO, 0, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    weights = {name: source.read(name) for name in spec.tensor_shapes()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    model.save_pretrained(directory)
    return directory


Answers = list[tuple[list[int], list[dict[int, float]]]]


def answers_of(model: Path, adapter: Path, **settings: str) -> Answers:
    """Tokens and logprobs of base and adapter: all prompts at once, then each alone, as equal."""
    llm = LLM(str(model), enable_lora=True, **settings)
    llm.load_lora_adapter("a", str(adapter))
    outputs = [
        each for name in (None, "a") for each in llm.generate(PROMPTS, PARAMS, lora_name=name)
    ]
    alone = [
        llm.generate([each], PARAMS, lora_name=name)[0] for name in (None, "a") for each in PROMPTS
    ]
    llm.close()
    both = [
        [(each.outputs[0].token_ids, logprobs_of(each.outputs[0])) for each in some]
        for some in (outputs, alone)
    ]
    assert both[0] == both[1]
    assert len({str(answer) for answer in both[0]}) == 2 * len(PROMPTS)
    return both[0]


def logprobs_of(output: CompletionOutput) -> list[dict[int, float]]:
    return [{each.token_id: each.logprob, **dict(each.top)} for each in output.logprobs]


def test_quantised_again_it_answers_as_its_dequantised_weights_do_to_the_bit(
    file: Path, dequantised: Path, adapter_paths: list[Path]
) -> None:
    settings = {"dtype": "bfloat16", "quantization": "int8"}
    ours, expected = (answers_of(m, adapter_paths[0], **settings) for m in (file, dequantised))
    assert ours == expected


def test_from_its_codes_it_answers_as_its_dequantised_weights_do(
    file: Path, dequantised: Path, adapter_paths: list[Path]
) -> None:
    ours, expected = (answers_of(m, adapter_paths[0], dtype="float32") for m in (file, dequantised))
    for (tokens, logprobs), (same_tokens, same_logprobs) in zip(ours, expected, strict=True):
        assert tokens == same_tokens
        assert logprobs == [pytest.approx(step, abs=1e-4) for step in same_logprobs]


def test_a_chat_is_written_by_the_files_own_template(file: Path) -> None:
    llm = LLM(str(file))
    (output,) = llm.chat([[{"role": "user", "content": "hi"}]], SamplingParams(max_tokens=1))
    assert llm.tokenizer.decode(output.prompt_token_ids) == "user: hi\nassistant: "
    assert llm.model_info.weights == "GGUF (F32, Q8_0), codes kept of Q8_0"
    llm.close()


def test_another_tokenizer_stands_in_for_one_that_cannot_be_used(
    file: Path, model_path: Path, tmp_path: Path
) -> None:
    silent = tmp_path / "m.gguf"
    silent.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.other"))
    with pytest.raises(ConfigError, match="its kind is 'none'; known are"):
        Tokenizer(str(silent))
    others, own = Tokenizer(str(model_path), model=str(silent)), Tokenizer(str(model_path))
    assert others.eos_token_ids == own.eos_token_ids


def test_a_file_is_refused_for_its_model_and_its_tokenizer_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(16))
    with pytest.raises(ConfigError) as refused:
        check_startup(EngineConfig(model=ModelConfig(model=str(tmp_path / "m.gguf"))))
    model, tokenizer = str(refused.value).splitlines()
    assert "the architecture 'None' is not supported in GGUF files" in model
    assert "its tokenizer cannot be used: its kind is 'none'" in tokenizer
