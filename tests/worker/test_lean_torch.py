from __future__ import annotations

import subprocess
import sys

RULES = "torch._meta_registrations"


def printed(script: str) -> str:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_an_engines_process_imports_torch_without_rules_for_tensors_without_numbers() -> None:
    """They take a third of torch's import; the process ends here, for it has no parent."""
    script = (
        "import sys\n"
        "from lora_serve.engine.child import run_engine_process\n"
        "try:\n"
        "    run_engine_process(None)\n"
        "except AssertionError as error:\n"
        "    print(error)\n"
        f"print('torch' in sys.modules, 'lora_serve.worker.worker' in sys.modules, "
        f"'{RULES}' in sys.modules)\n"
    )
    assert printed(script).splitlines() == ["runs in a process of its own", "True True False"]


def test_the_rules_can_be_imported_later() -> None:
    """`meta` stands for a device, and its operator is one that only these rules know."""
    script = (
        "from lora_serve.worker.lean_torch import import_torch\n"
        "import_torch()\n"
        "import torch\n"
        "found = []\n"
        "x = torch.ones(3, 3, device='meta')\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        found.append(tuple(torch.cdist(x, x).shape))\n"
        "    except NotImplementedError:\n"
        "        found.append(None)\n"
        f"    import {RULES}\n"
        "print(found)\n"
    )
    assert printed(script) == "[None, (3, 3)]"


def test_numbers_can_be_drawn_before_the_rules_are_there_and_after() -> None:
    """Weights that are made up need it, and what is tried of reference kernels and modules."""
    draw = "torch.randn(2, generator=torch.Generator().manual_seed(1)).tolist()"
    script = (
        "from lora_serve.worker.lean_torch import import_torch\n"
        "import_torch()\n"
        "import torch\n"
        f"drawn = {draw}\n"
        f"import {RULES}\n"
        f"print(drawn == {draw}, len(set(drawn)))\n"
    )
    assert printed(script) == "True 2"


def test_torchs_threads_sleep_unless_the_user_says_how_they_wait() -> None:
    script = (
        "import os\n"
        "from lora_serve.worker.lean_torch import import_torch\n"
        "import_torch()\n"
        "print(os.environ.get('OMP_WAIT_POLICY'))\n"
    )
    assert printed(script) == "PASSIVE"
    assert printed("import os; os.environ['GOMP_SPINCOUNT'] = '5'\n" + script) == "None"


def test_where_torch_is_imported_already_nothing_changes() -> None:
    script = (
        "import sys, torch\n"
        "from lora_serve.worker.lean_torch import import_torch\n"
        "import_torch()\n"
        f"print('{RULES}' in sys.modules, hasattr(torch, '_meta_registrations'))\n"
    )
    assert printed(script) == "True True"


def test_another_version_of_torch_is_imported_whole() -> None:
    script = (
        "import sys\n"
        "from lora_serve.worker import lean_torch\n"
        "lean_torch.version = lambda name: '2.99.0'\n"
        "lean_torch.import_torch()\n"
        "import torch\n"
        f"print('{RULES}' in sys.modules)\n"
    )
    assert printed(script) == "True"
