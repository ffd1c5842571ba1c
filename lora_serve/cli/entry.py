"""What the command `lora-serve` calls. A Ctrl-C while `main` is imported is no traceback either."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run one command; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this process at once, and quietly
    from lora_serve.cli.main import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
