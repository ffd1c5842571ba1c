"""Python programs as forks of a process that has imported what takes seconds to import.

`python -m tests.e2e.warm_python SOCKET` is that process; `CLIENT` asks it from a shell, with the
arguments that Python would get. A program has its caller's directory, environment and files.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

CLIENT = """
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
asked = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [asked], [0, 1, 2])
sys.exit(int(server.recv(8) or 1))
"""
MAX_BYTES = 2**18


@contextmanager
def warm_python(place: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The beginning of a command that stands for `python` meanwhile."""
    path = place / "python.sock"
    command = [sys.executable, "-m", __name__, str(path)]
    process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < ends, "it does not begin"
        time.sleep(0.05)
    try:
        yield sys.executable, "-ISc", CLIENT, str(path)
    finally:
        process.terminate()
        process.wait(60)


def serve(path: str) -> None:
    """Fork for each program; returns in the fork, where the program has still to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(16)
    os.rename(f"{path}.new", path)
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            asked, files, _, _ = socket.recv_fds(caller, MAX_BYTES, 3)
            program = os.fork()
            if program == 0:
                caller.close()
                return become(asked, files)
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            caller.sendall(str(code if code >= 0 else 128 - code).encode())
            os._exit(0)
        caller.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def become(asked: bytes, files: list[int]) -> None:
    arguments, directory, environment = json.loads(asked)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments


def run() -> None:
    """Run what sys.argv holds, as Python would."""
    match sys.argv:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", "lora_serve.cli.main", *rest]:
            from lora_serve.cli.main import main

            sys.argv = ["lora-serve", *rest]
            sys.exit(main(rest))
        case [script, *_]:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")


def ended() -> int:
    """Run it to its end; the exit code, as Python has it."""
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # No thread may be there when it forks: what is imported here starts none.
    import openai  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import tests.deploy.command_lines  # noqa: F401

    gc.freeze()  # to look at all objects, or to free them in the end, would copy them for each fork
    serve(sys.argv[1])
    code = ended()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
