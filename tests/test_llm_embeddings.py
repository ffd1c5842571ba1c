"""Embeddings of real models: what transformers gives, and exact whatever was cached or cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel

from lora_serve.errors import InvalidRequestError
from lora_serve.llm import LLM
from lora_serve.outputs import EmbeddingOutput
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.peft_adapters import save_adapters
from tests.fakes.served_model import save_served_model
from tests.test_llm import NAMES, load_adapters, prompts_with_shared_prefixes

LAST, MEAN = PoolingParams(), PoolingParams(pooling_type="MEAN", normalize=False)
ALL = PoolingParams(pooling_type="ALL", normalize=False)
ARITHMETIC: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("qwen2", {"dtype": "float32"}),
    "gemma2, int4 and 8": (
        "gemma2",
        {"dtype": "float16", "quantization": "int4", "quantize_activations": True},
    ),
    "reference": ("qwen2", {"override_op": ("all=reference",), "cpu_threads": 1}),
}
PROMPTS = prompts_with_shared_prefixes(12)
PARAMS = [LAST, MEAN, ALL] * 4
LORA_NAMES = [NAMES[i % len(NAMES)] for i in range(len(PROMPTS))]


def values(outputs: list[EmbeddingOutput]) -> list[list[float]]:
    return [output.embedding for output in outputs]


class Subject:
    """A model with three adapters; `expected` is what a cold engine gives each prompt alone."""

    def __init__(self, root: Path, family: str, arithmetic: dict[str, Any]) -> None:
        self._model = save_served_model(root / "model", family)
        self._adapters = save_adapters(root / "adapters", family)
        self._arithmetic = arithmetic
        with self.llm(enable_prefix_caching=False, max_num_seqs=1) as lone:
            self.expected = [
                values(lone.embed(prompt, params, lora_name=name))[0]
                for prompt, params, name in zip(PROMPTS, PARAMS, LORA_NAMES, strict=True)
            ]

    def llm(self, **settings: Any) -> LLM:
        llm = LLM(str(self._model), enable_lora=True, **self._arithmetic, **settings)
        load_adapters(llm, self._adapters)
        return llm


@pytest.fixture(scope="module", params=ARITHMETIC)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    family, arithmetic = ARITHMETIC[request.param]
    return Subject(tmp_path_factory.mktemp(family), family, arithmetic)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 23, "async_scheduling": True},
        {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 64},
        {"max_loras": 1},
    ],
    ids=["odd chunks, overlapped", "few blocks", "one adapter a step"],
)
def test_company_chunks_and_the_cache_change_no_bit(
    subject: Subject, settings: dict[str, Any]
) -> None:
    with subject.llm(validate=True, **settings) as llm:
        cold = llm.embed(PROMPTS, PARAMS, lora_name=LORA_NAMES)
        warm = llm.embed(PROMPTS, PARAMS, lora_name=LORA_NAMES)
    assert values(cold) == subject.expected
    assert values(warm) == subject.expected
    num_cached = {output.num_cached_tokens for output in warm[1::3] + warm[2::3]}
    assert num_cached == {0}, "a mean needs the hidden states of all tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_are_those_of_transformers(model_path: Path, dtype: str) -> None:
    """A mean as sentence-transformers defines it."""
    model = AutoModel.from_pretrained(model_path, dtype=getattr(torch, dtype))
    prompt = PROMPTS[1]
    with torch.no_grad():
        hidden = model(torch.tensor([prompt.token_ids])).last_hidden_state[0].float()
    kinds = [
        (PoolingParams(normalize=False), hidden[-1]),
        (PoolingParams(), normalize(hidden[-1], dim=0)),
        (PoolingParams(dimensions=10), normalize(hidden[-1][:10], dim=0)),
        (MEAN, hidden.mean(0)),
        (PoolingParams(pooling_type="MEAN"), normalize(hidden.mean(0), dim=0)),
        (PoolingParams(pooling_type="ALL"), normalize(hidden, dim=1).flatten()),
    ]
    with LLM(str(model_path), dtype=dtype) as llm:
        outputs = llm.embed([prompt] * len(kinds), [params for params, _ in kinds])
    tolerance = 1e-4 if dtype == "float32" else 0.05
    for output, (_, expected) in zip(outputs, kinds, strict=True):
        torch.testing.assert_close(
            torch.tensor(output.embedding), expected, rtol=tolerance, atol=tolerance
        )


def test_embeddings_and_answers_share_a_prefix_both_ways(model_path: Path) -> None:
    prompt = TokensPrompt(tuple(i % 90 for i in range(70)))
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(str(model_path)) as llm:
        (mean,) = llm.embed(prompt, MEAN)
        (answer,) = llm.generate(prompt, params)
        (last,) = llm.embed(prompt)
        assert (mean.num_cached_tokens, answer.num_cached_tokens) == (0, 64)
        assert last.num_cached_tokens == 64
        assert llm.stats().num_generated_tokens == 2, "an embedding samples nothing"


def test_the_settings_say_how_embeddings_are_made(model_path: Path) -> None:
    with LLM(str(model_path)) as llm:
        (last,) = llm.embed("hi")
        (mean,) = llm.embed("hi", MEAN)
    with LLM(str(model_path), pooler_config='{"pooling_type": "MEAN", "normalize": false}') as llm:
        assert values(llm.embed(["hi"])) == [mean.embedding]
        assert values(llm.embed("hi", LAST)) == [last.embedding]


def test_mistakes_are_named(model_path: Path) -> None:
    with LLM(str(model_path)) as llm:
        with pytest.raises(InvalidRequestError, match="dimensions must be in"):
            llm.embed("hi", PoolingParams(dimensions=65))
        with pytest.raises(InvalidRequestError, match="2 prompts but 1 params"):
            llm.embed(["hi", "ho"], [LAST])
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            llm.embed("")
        assert len(llm.embed("hi")[0].embedding) == 64
