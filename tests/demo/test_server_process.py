from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys

import pytest

PARENT = """
import subprocess
from lora_serve.demo.server_process import dying_with_parent
subprocess.run(dying_with_parent(("sh", "-c", "echo $$; exec sleep 600")))
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no util-linux")
def test_a_server_does_not_outlive_a_killed_parent() -> None:
    with subprocess.Popen((sys.executable, "-c", PARENT), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            ended, _, _ = select.select([child], [], [], 30)
            assert ended, "it runs on"
        finally:
            os.close(child)
