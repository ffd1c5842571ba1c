from __future__ import annotations

import subprocess
import sys


def test_a_low_limit_of_files_lowers_that_of_connections_with_a_warning() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400)); "
        "from lora_serve.server.http.system_limits import allowed_connections as allowed; "
        "print(allowed(100), allowed(250), allowed(1000), "
        "resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "100 250 272 (400, 400)\n", done.stderr
    assert "--max-connections 1000" in done.stderr
