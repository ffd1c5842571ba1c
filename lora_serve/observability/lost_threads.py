"""The end of a process that has lost a thread: it is told in the log, and comes at once.

What the thread did would be waited for in vain; whoever has started the process starts the next.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

EXIT_CODE_OF_LOST_THREAD = 70


def exit_with_any_thread(who: str) -> None:
    """End this process when one of its threads ends by an exception that it did not expect.

    who: the process, as the log names it.
    """

    def end(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "a thread"
        error = args.exc_value or args.exc_type()
        logger.critical("%s ends: its thread %s has died", who, name, exc_info=error)
        logging.shutdown()  # wait for that line
        os._exit(EXIT_CODE_OF_LOST_THREAD)

    threading.excepthook = end
