from __future__ import annotations

import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import lora_serve
from lora_serve import errors
from tests.fakes.gguf_files import write_byte_level
from tests.fakes.tokenizer_files import byte_level_tokenizer, saved

SCRIPT = """
import sys
from lora_serve.llm import LLM

with LLM(sys.argv[1], num_gpu_blocks_override=20) as llm:
    print([name for name in ("torch._dynamo", "triton") if name in sys.modules])
"""


PUBLIC = """
import sys
import lora_serve

before = [name for name in ("torch", "msgspec", "transformers") if name in sys.modules]
from lora_serve import *

print(before, LLM.__name__, SamplingParams.__name__, issubclass(AdapterError, LoraServeError))
"""


def test_the_package_has_what_users_import_and_loads_it_only_then() -> None:
    command = [sys.executable, "-c", PUBLIC]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[] LLM SamplingParams True"


def test_every_error_is_public() -> None:
    ours = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert ours <= set(lora_serve.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        lora_serve.LLMs  # noqa: B018


API_PROCESS = """
import sys
import lora_serve.engine.frontend.async_engine
import lora_serve.server.app
from lora_serve.text.tokenizer import Tokenizer

engines = ("engine.core", "scheduler", "kv", "adapters", "worker", "models", "layers", "ops")
print([name for name in engines if f"lora_serve.{name}" in sys.modules])
gguf, *directories = sys.argv[1:]
Tokenizer(gguf).render_chat([{"role": "user", "content": "hi"}])
print([name for name in ("torch", "transformers") if name in sys.modules])
for path in directories:
    Tokenizer(path).decode([0])
print([name for name in ("torch._dynamo", "triton") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def api_process(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The tokenizers of some families import more than others."""
    models = []
    for family in ("qwen2", "llama", "mistral", "gemma3_text"):
        models.append(saved(byte_level_tokenizer(), tmp_path_factory.mktemp(family)))
        (models[-1] / "config.json").write_text(json.dumps({"model_type": family}))
    gguf = write_byte_level(tmp_path_factory.mktemp("gguf") / "m.gguf")
    command = [sys.executable, "-c", API_PROCESS, str(gguf), *map(str, models)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_the_api_process_imports_nothing_of_the_engine_that_it_starts(
    api_process: subprocess.CompletedProcess[str],
) -> None:
    assert api_process.stdout.splitlines()[0] == "[]"


def test_the_api_of_a_gguf_file_imports_neither_torch_nor_transformers(
    api_process: subprocess.CompletedProcess[str],
) -> None:
    """Which would take as long as all else of it: not for its tokenizer, not for its chats."""
    assert api_process.stdout.splitlines()[1] == "[]"


def test_the_api_process_imports_no_compiler_and_no_triton(
    api_process: subprocess.CompletedProcess[str],
) -> None:
    assert api_process.stdout.splitlines()[2:] == ["[]"]
    assert "nanobind" not in api_process.stderr


def test_an_engine_on_a_cpu_imports_no_compiler_and_no_triton(model_path: Path) -> None:
    """They take seconds of a start and memory, and tell of leaks when the process ends."""
    command = [sys.executable, "-c", SCRIPT, str(model_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_no_modules_import_each_other_in_a_circle_not_even_for_their_types() -> None:
    graph = grimp.build_graph("lora_serve", cache_dir=None)
    names_what_users_import = "lora_serve"
    TopologicalSorter(
        {
            name: graph.find_modules_directly_imported_by(name) - {names_what_users_import}
            for name in graph.modules
        }
    ).prepare()
