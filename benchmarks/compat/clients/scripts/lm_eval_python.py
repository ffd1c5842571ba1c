"""The paths of lm-eval: its two models for HTTP, on tasks of three questions of ours."""

import asyncio
import json
import tempfile
from pathlib import Path

from client_paths import BASE_URL, MODEL, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "The capital of France is", "answer": " Paris", "wrong": " green"},
    {"question": "Two and two are", "answer": " four", "wrong": " Sunday"},
    {"question": "The sky is", "answer": " blue", "wrong": " seven"},
]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """
task: choices
output_type: multiple_choice
doc_to_choice: ["{{answer}}", "{{wrong}}"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: written
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def evaluate(kind, path, task, **settings):
    """The task's result for each question."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.json"
        rows.write_text(json.dumps(ROWS))
        common = COMMON.format(rows=rows)
        (folder / "choices.yaml").write_text(common + CHOICES)
        (folder / "written.yaml").write_text(common + WRITTEN)
        served = {"model": MODEL, "base_url": f"{BASE_URL}/{path}", "num_concurrent": 1}
        return simple_evaluate(
            model=kind,
            model_args={**served, "max_retries": 1, **settings},
            tasks=[task],
            task_manager=TaskManager(include_path=name, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
            apply_chat_template="chat" in kind,
        )


def on_a_loop_of_its_own(kind, path, task, **settings):
    return asyncio.to_thread(evaluate, kind, path, task, **settings)


async def loglikelihoods():
    """Prompts as token ids, by the server's own /tokenize and /tokenizer_info."""
    result = await on_a_loop_of_its_own(
        "local-completions", "completions", "choices", tokenizer_backend="remote"
    )
    assert result["results"]["choices"]["acc,none"] > 0.5, result["results"]


async def completions():
    result = await on_a_loop_of_its_own(
        "local-completions", "completions", "written", tokenizer_backend="remote"
    )
    assert all(sample["resps"][0][0] for sample in result["samples"]["written"])


async def chat():
    result = await on_a_loop_of_its_own(
        "local-chat-completions", "chat/completions", "written", tokenizer_backend=None
    )
    assert all(sample["resps"][0][0] for sample in result["samples"]["written"])


run(loglikelihoods=loglikelihoods, completions=completions, chat=chat)
