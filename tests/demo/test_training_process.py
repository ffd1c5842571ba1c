from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FAILING = """
import sys
from dataclasses import replace
from pathlib import Path
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.training_process import TrainingProcessError, train_in_process

if __name__ == "__main__":
    try:
        train_in_process(replace(Recipe(), max_attempts=0), Path(sys.argv[1]), print)
    except TrainingProcessError as error:
        names = ("torch", "transformers", "peft", "triton")
        print(error, [name for name in names if name in sys.modules])
"""


def test_a_training_that_fails_says_so_leaves_no_library_behind_and_is_silent_of_leaks(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip().endswith("exit code 1; see above []")
    assert "nanobind" not in done.stderr
