"""The engine's process before it is an engine: what it checks, and that it may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.engine.settings import engine_config
from lora_serve.errors import ConfigError


def test_it_tells_what_no_engine_can_start_with_and_goes_on(model_path: Path) -> None:
    with closing(EngineProcess()) as process:
        process.spawn()
        wrong = engine_config(model=str(model_path), max_model_len=10**9, tokenizer="/z")
        process.begin_check(wrong)
        with pytest.raises(ConfigError, match=r"(?s)--max-model-len.*/z"):
            process.end_check()
        process.begin_check(engine_config(model=str(model_path)))
        process.end_check()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.begin_check(engine_config(model=str(model_path)))
        with pytest.raises(ConfigError, match=r"ended while it checked.* exit code -9"):
            process.end_check()


def test_the_servers_own_process_imports_no_torch() -> None:
    """It would take as long as all else that it imports, at each start."""
    script = (
        "import sys\n"
        "from lora_serve.cli.serve_run import _import_server\n"
        "from lora_serve.text.without_torch import import_transformers\n"
        "import_transformers()\n"
        "_import_server()\n"
        "import lora_serve.text.transformers_tokenizer, lora_serve.structured_output.client\n"
        "assert 'transformers' in sys.modules\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']\n"
        "import torch\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
