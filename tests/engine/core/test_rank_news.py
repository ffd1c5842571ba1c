"""A lost rank ends the engine's process, and is told once: to the API process, or in the log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from lora_serve.engine import wire
from lora_serve.engine.core.rank_news import EXIT_CODE_OF_LOST_RANK
from lora_serve.errors import RankLostError
from lora_serve.messages import EngineEnds, EngineReady, RanksLate

SCRIPT = """
import logging, sys, threading, time
from lora_serve.engine.core.rank_news import RankNews
from lora_serve.errors import RankLostError

logging.basicConfig(format="%(message)s")
news = RankNews(sys.argv[1])
news.late([1])
if sys.argv[2] == "ready":
    news.note_ready()
for _ in range(2):  # the engine's own thread finds it, too
    threading.Thread(target=news.lost, args=(RankLostError("rank 1 is gone"),)).start()
time.sleep(30)
"""


@pytest.mark.parametrize("state", ["starting", "ready"])
def test_a_lost_rank_is_told_once_and_ends_the_process(short_path: Path, state: str) -> None:
    address = f"ipc://{short_path}/replies"
    with zmq.Context() as context, context.socket(zmq.PULL) as replies:
        replies.bind(address)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, address, state],
            capture_output=True,
            text=True,
            timeout=25,
        )
        assert done.returncode == EXIT_CODE_OF_LOST_RANK
        decoder, told = wire.reply_decoder(), []
        while replies.poll(200):
            told.append(decoder.decode(replies.recv()))
    assert told[0] == RanksLate((1,))
    if state == "ready":
        assert told[1:] == [EngineEnds("rank 1 is gone")]
        assert done.stderr == "the engine ends: rank 1 is gone\n"
        return
    (ready,) = told[1:]
    assert isinstance(ready, EngineReady)
    assert ready.error is not None
    error = wire.error_from_info(ready.error)
    assert isinstance(error, RankLostError)
    assert str(error) == "rank 1 is gone"
    assert done.stderr == ""
