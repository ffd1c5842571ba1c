"""The processes below one that a test started, while its threads come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.e2e.processes import pids_below


def test_a_process_is_found_while_threads_end() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input('a sleeper')"], stdin=subprocess.PIPE)
    is_over = threading.Event()

    def start_and_end() -> None:
        while not is_over.is_set():
            threads = [threading.Thread(target=int) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    busy = threading.Thread(target=start_and_end)
    busy.start()
    try:
        for _ in range(200):
            assert sleeper.pid in pids_below(os.getpid(), b"a sleeper")
    finally:
        is_over.set()
        busy.join()
        sleeper.communicate()
