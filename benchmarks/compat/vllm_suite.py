"""vLLM's own tests of its HTTP server, from its source distribution, pointed at ours.

Each file runs in vLLM's environment with a time limit; what every test said is read from pytest's
JUnit report. Which verdicts are no fault of ours, and why, stands in verdicts.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.vllm import VERSION

# pytest 9.2 lets nobody rename its tests, which schemathesis does.
TEST_PACKAGES = (
    "pytest<9.1", "pytest-asyncio", "tblib", "anthropic", "openai", "cloudpickle", "jsonschema",
    "requests", "httpx", "pillow", "regex", "schemathesis", "openai-harmony",
)  # fmt: skip
FILES = (
    "tests/entrypoints/anthropic/test_messages.py",
    "tests/entrypoints/openai/chat_completion/test_batched_chat_completions.py",
    "tests/entrypoints/openai/chat_completion/test_chat.py",
    "tests/entrypoints/openai/chat_completion/test_chat_completion.py",
    "tests/entrypoints/openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "tests/entrypoints/openai/chat_completion/test_chat_echo.py",
    "tests/entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "tests/entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "tests/entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "tests/entrypoints/openai/chat_completion/test_extra_content_fields.py",
    "tests/entrypoints/openai/chat_completion/test_include_reasoning.py",
    "tests/entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "tests/entrypoints/openai/chat_completion/test_root_path.py",
    "tests/entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "tests/entrypoints/openai/completion/test_completion.py",
    "tests/entrypoints/openai/completion/test_completion_with_prompt_embeds.py",
    "tests/entrypoints/openai/completion/test_prompt_validation.py",
    "tests/entrypoints/openai/completion/test_token_in_token_out.py",
    "tests/entrypoints/openai/models/test_models.py",
    "tests/entrypoints/openai/responses/test_simple.py",
    "tests/entrypoints/openai/test_chunked_prompt.py",
    "tests/entrypoints/openai/test_openai_schema.py",
    "tests/entrypoints/openai/test_return_token_ids.py",
    "tests/entrypoints/openai/test_return_tokens_as_ids.py",
    "tests/entrypoints/pooling/basic/test_truncation.py",
    "tests/entrypoints/pooling/embed/test_cohere_online.py",
    "tests/entrypoints/pooling/embed/test_cohere_openai_parity.py",
    "tests/entrypoints/pooling/embed/test_online.py",
    "tests/entrypoints/pooling/scoring/test_bi_encoder_online.py",
    "tests/entrypoints/pooling/token_embed/test_online.py",
    "tests/entrypoints/scale_out/token_in_token_out/test_serving_tokens.py",
    "tests/entrypoints/serve/instrumentator/test_basic.py",
    "tests/entrypoints/serve/instrumentator/test_metrics.py",
    "tests/entrypoints/serve/instrumentator/test_orca_metrics.py",
    "tests/entrypoints/serve/instrumentator/test_uds.py",
    "tests/entrypoints/serve/lora/test_lora_adapters.py",
    "tests/entrypoints/serve/middleware/test_optional_middleware.py",
    "tests/entrypoints/serve/sagemaker/test_sagemaker_handler_overrides.py",
    "tests/entrypoints/serve/sagemaker/test_sagemaker_lora_adapters.py",
    "tests/entrypoints/serve/sagemaker/test_sagemaker_middleware_integration.py",
    "tests/entrypoints/serve/sagemaker/test_sagemaker_stateful_sessions.py",
    "tests/entrypoints/serve/tokenize/test_tokenization.py",
    "tests/tool_use/test_chat_completions.py",
    "tests/tool_use/test_parallel_tool_calls.py",
    "tests/tool_use/test_tool_calls.py",
)
# It draws thousands of bodies and looks at no text; the demo model answers them much faster.
OF_ANY_MODEL = "tests/entrypoints/openai/test_openai_schema.py"
MOST_MESSAGE = 200  # characters of why a test failed
WANTED = (["tests"], ["examples"], ["pyproject.toml"])  # its package would hide the built one


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one test said. outcome: passed, failed, error or skipped."""

    file: str
    name: str
    outcome: str
    message: str = ""


def ensure_tests(cache: Path) -> Path:
    """The unpacked source distribution of the version that benchmarks.peers measures."""
    source = cache / f"vllm-{VERSION}"
    if not source.is_dir():
        archive = cache / f"vllm-{VERSION}.tar.gz"
        urllib.request.urlretrieve(_source_url(), archive)
        with tarfile.open(archive) as packed:
            wanted = [m for m in packed.getmembers() if m.name.split("/")[1:2] in WANTED]
            packed.extractall(cache, wanted, filter="data")
    return source


def _source_url() -> str:
    """Where pip's package index has the source: pip itself would build it to tell us."""
    from pip._internal.models.index import PyPI

    asked = urllib.request.Request(
        f"{PyPI.simple_url}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked) as answer:
        files = json.load(answer)["files"]
    (url,) = (file["url"] for file in files if file["filename"] == f"vllm-{VERSION}.tar.gz")
    return str(url)


def install_test_packages(environment: Environment) -> None:
    mark = environment.root / "compat-installed"
    recipe = " ".join(TEST_PACKAGES)
    if not mark.is_file() or mark.read_text() != recipe:
        environment.pip(*TEST_PACKAGES)
        mark.write_text(recipe)


def run_file(
    file: str,
    source: Path,
    environment: Environment,
    variables: dict[str, str],
    reports: Path,
    patience_seconds: float,
) -> list[SuiteResult]:
    """The results of a file's tests; one more, an error in the file's name, if it was ended."""
    report = report_path(file, reports)
    command = [str(environment.python), "-m", "pytest", "-p", "redirect", "-q", file]
    ours = {"PYTHONPATH": f"{Path(__file__).parent}:{source}", "HF_HUB_OFFLINE": "1"}
    ended = run_pytest(
        [*command, "-o", "addopts="], source, {**ours, **variables}, report, patience_seconds
    )
    results = read_report(file, report) if report.is_file() else []
    if not ended:
        late = f"did not end within {patience_seconds:g} s"
        return [*results, SuiteResult(file, "", "error", late)]
    return results or [SuiteResult(file, "", "error", "pytest reports no test")]


def run_pytest(
    command: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    report: Path,
    patience_seconds: float,
    grace_seconds: float = 120.0,
) -> bool:
    """Write pytest's report, and its output beside it; False if it was ended before its last test.

    It is interrupted then, so that its fixtures end their servers and what has been tested is in
    the report; killed after `grace_seconds` more.
    """
    report.unlink(missing_ok=True)
    with report.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--junitxml", str(report)],
            cwd=cwd,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_take_interrupts,
        )
        for number, seconds in ((signal.SIGINT, patience_seconds), (signal.SIGKILL, grace_seconds)):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
            else:
                return number == signal.SIGINT
        process.wait()
        return False


def _take_interrupts() -> None:
    """What a shell starts in the background ignores them, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def report_path(file: str, reports: Path) -> Path:
    return reports / (file.replace("/", ".") + ".xml")


def read_report(file: str, report: Path) -> list[SuiteResult]:
    """Its tests; of one that was interrupted there is an element without a name."""
    cases = ElementTree.parse(report).iter("testcase")
    return [_result(file, case) for case in cases if case.get("name")]


def _result(file: str, case: ElementTree.Element) -> SuiteResult:
    for kind, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            return SuiteResult(
                file, case.get("name", ""), outcome, found.get("message", "")[:MOST_MESSAGE]
            )
    return SuiteResult(file, case.get("name", ""), "passed")


def our_command(cpu_threads: int | None) -> str:
    """cpu_threads: of each server; None for its own default."""
    command = f"{Path(sys.executable).with_name('lora-serve')} serve"
    return command if cpu_threads is None else f"{command} --cpu-threads {cpu_threads}"
