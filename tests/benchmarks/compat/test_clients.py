import subprocess
import sys

import pytest

from benchmarks.compat.clients.__main__ import merged, section, table
from benchmarks.compat.clients.inventory import CLIENTS, SCRIPTS, chosen_clients
from benchmarks.compat.clients.running import ClientResult, read_paths

SERVER = {"COMPAT_SERVER": "http://nowhere", "COMPAT_MODEL": "m", "COMPAT_ADAPTER": "a"}
FIRST = ClientResult("litellm", "1.2", {"chat": "", "tools": "KeyError: name"})


def test_every_script_is_some_clients_and_every_client_has_one() -> None:
    scripts = {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".mjs")}
    helpers = {"client_paths.py", "client_paths.mjs"}
    assert scripts - helpers == {client.script for client in CLIENTS}


def test_clients_are_chosen_by_the_begin_of_their_names() -> None:
    assert [c.name for c in chosen_clients(["openai,"])] == ["openai, Python", "openai, Node"]
    assert chosen_clients([]) == list(CLIENTS)
    with pytest.raises(ValueError, match="no client is called 'curl'"):
        chosen_clients(["curl"])


def test_a_script_says_of_each_path_whether_it_went() -> None:
    script = (
        "from client_paths import run\n"
        "async def slow(): raise KeyError('name')\n"
        "run(chat=lambda: print('noise'), tools=slow)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**SERVER, "PYTHONPATH": str(SCRIPTS), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert read_paths(out.stdout) == {"chat": "", "tools": "KeyError: 'name'"}


def test_the_table_leaves_empty_what_a_client_does_not_have() -> None:
    other = ClientResult("lm-eval", "0.4", {"chat": ""})
    assert table([FIRST, other]).splitlines() == [
        "| client | chat | tools |",
        "|---|:-:|:-:|",
        "| litellm 1.2 | ✓ | **fails** |",
        "| lm-eval 0.4 | ✓ |  |",
    ]
    assert "\n- litellm, tools: KeyError: name\n" in section([FIRST, other])


def test_clients_that_were_not_run_keep_their_rows() -> None:
    again = ClientResult("litellm", "1.3", {"chat": ""})
    lm_eval = ClientResult("lm-eval", "0.4", {"chat": ""})
    assert merged([lm_eval, FIRST], [again]) == [again, lm_eval]
