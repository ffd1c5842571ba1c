"""The paths of guidellm: two requests each of completions and of chats."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from client_paths import MODEL, SERVER, run

TOKENIZER = os.environ["COMPAT_CHECKPOINT"]


def benchmark(route):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
            *(
                "--backend",
                f"kind=openai_http,target={SERVER},model={MODEL},request_format={route}",
            ),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"),
            *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--output", f"kind=json,path={out}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert out.is_file(), done.stdout[-300:] + done.stderr[-300:]
        (measured,) = json.loads(out.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (2, 0), totals


run(
    completions=lambda: benchmark("/v1/completions"),
    chat=lambda: benchmark("/v1/chat/completions"),
)
