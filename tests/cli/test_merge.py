"""Merged weights against the model with its adapter, both as the engine serves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lora_serve.cli.main import main
from lora_serve.llm import LLM
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

PROMPT = TokensPrompt(tuple(i % 90 for i in range(40)))
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


def test_merged_weights_answer_as_model_and_adapter(
    model_path: Path, adapter_paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "merged"
    assert main(["merge", str(model_path), str(adapter_paths[1]), str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert [path.name for path in out.parent.iterdir()] == ["merged"]
    with LLM(str(model_path), enable_lora=True, num_gpu_blocks_override=50) as llm:
        llm.load_lora_adapter("a", str(adapter_paths[1]))
        (base,) = llm.generate(PROMPT, GREEDY)
        (adapted,) = llm.generate(PROMPT, GREEDY, lora_name="a")
    with LLM(str(out), num_gpu_blocks_override=50) as llm:
        (merged,) = llm.generate(PROMPT, GREEDY)
    assert merged.outputs[0].token_ids == adapted.outputs[0].token_ids
    assert merged.outputs[0].token_ids != base.outputs[0].token_ids
    for ours, theirs in zip(merged.outputs[0].logprobs, adapted.outputs[0].logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda model, adapter, out: out.mkdir(), "exists already"),
        (lambda model, adapter, out: shutil.rmtree(adapter), "No adapter found"),
        (lambda model, adapter, out: shutil.rmtree(model), "cannot be read as a model"),
        (
            lambda model, adapter, out: (adapter / "adapter_model.safetensors").write_bytes(b"x"),
            "cannot be added",
        ),
        (
            lambda model, adapter, out: save_file({}, adapter / "adapter_model.safetensors"),
            "missing adapter keys",
        ),
    ],
)
def test_what_cannot_be_merged_is_one_line_and_leaves_nothing(
    model_path: Path,
    adapter_paths: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    break_it: object,
    words: str,
) -> None:
    assert callable(break_it)
    model, adapter, out = tmp_path / "model", tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(model_path, model)
    shutil.copytree(adapter_paths[0], adapter)
    break_it(model, adapter, out)
    before = sorted(tmp_path.iterdir())
    assert main(["merge", str(model), str(adapter), str(out)]) == 2
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
