"""Trains the demo's model in a process of its own, which takes its libraries with it.

They would stay in the memory of a server that goes on, and Triton tells of leaks when it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from lora_serve.demo.recipe import Recipe


class TrainingProcessError(RuntimeError):
    """The training failed, for the reason that its process has written to stderr."""


def train_in_process(recipe: Recipe, directory: Path, progress: Callable[[str], None]) -> None:
    """Fill `directory` as `build_demo` does. The process ends with this one, or by an exception.

    Raises:
        TrainingProcessError: it ended without a model.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(
        target=_train, args=(recipe, directory, there), name="demo-training", daemon=True
    )
    process.start()
    there.close()
    try:
        with here:
            while True:
                progress(here.recv())
    except EOFError:
        process.join()
    finally:
        process.kill()
        process.join()
    if process.exitcode != 0:
        raise TrainingProcessError(
            f"training the demo's model failed with exit code {process.exitcode}; see above"
        )


def _train(recipe: Recipe, directory: Path, parent: Connection) -> None:
    """Train, tell `parent` how it goes, and end without what libraries say at an end."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        from lora_serve.demo.build import build_demo  # torch, transformers, peft

        build_demo(recipe, directory, parent.send)
    except KeyboardInterrupt:  # of a terminal: the parent has it, too
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _end_with(parent: Connection) -> None:
    """End this process when the parent's has ended, which says nothing else."""
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)
