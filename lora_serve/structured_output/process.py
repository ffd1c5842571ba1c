"""The grammars' process: `python -m`, with the file descriptors of a socket and of `AtWork`.

One thread follows all answers (`grammar_server.py`). Another reads what is asked for. It ends when
the engine closes its end of the socket.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from lora_serve.observability.log import set_up_logging
from lora_serve.structured_output import wire
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.backend import Vocabulary, load_backend
from lora_serve.structured_output.grammar_server import GrammarServer, Inbox
from lora_serve.structured_output.trial import TrialProcess, TrialStarter
from lora_serve.structured_output.wire import GrammarSettings
from lora_serve.text.without_torch import import_for_tokenizer

logger = logging.getLogger(__name__)

COMPILES_AT_ONCE = 2
PROCESS = "grammars"  # in lines of the log


def serve(connection: Connection, at_work: AtWork) -> None:
    """Read the settings, load the tokenizer, and answer until the engine is gone."""
    decoder = wire.message_decoder()
    settings = decoder.decode(connection.recv_bytes())
    assert isinstance(settings, GrammarSettings), "the first message must be the settings"
    set_up_logging(settings.log, PROCESS, in_background=False)
    import_for_tokenizer(settings.tokenizer)
    from lora_serve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(settings.tokenizer, settings.revision, model=settings.model)
    eos_token_ids = tokenizer.eos_token_ids
    vocabulary = Vocabulary(
        tokenizer.to_json(),
        settings.vocab_size,
        eos_token_ids,
        tokenizer.token_bytes,
        tokenizer.special_token_ids,
    )
    cache = GrammarCache(settings.max_grammars, settings.max_cache_bytes)
    answers = Answers(cache, settings.vocab_size, eos_token_ids, settings.max_drafts)
    backend = load_backend(settings.backend, vocabulary)
    starter = TrialStarter(
        backend, seconds=settings.compile_seconds, max_bytes=settings.max_grammar_bytes
    )
    trials = [TrialProcess(starter) for _ in range(COMPILES_AT_ONCE)]
    set_up_logging(settings.log, PROCESS)  # starts a thread, so not before the trials' fork
    logger.debug("ready, with %s and %d tokens", settings.backend, settings.vocab_size)
    server = GrammarServer(backend, trials, answers, cache, at_work)
    threading.Thread(
        target=_receive, args=(connection, decoder, server.inbox), name="receiver", daemon=True
    ).start()
    server.run(connection)


def _receive(
    connection: Connection, decoder: msgspec.msgpack.Decoder[wire.GrammarMessage], inbox: Inbox
) -> None:
    """Always read, so that the engine never waits for this process to take what it sends."""
    try:
        while True:
            message = decoder.decode(connection.recv_bytes())
            assert not isinstance(message, GrammarSettings), "settings come once"
            inbox.put(message)
    except (EOFError, OSError):
        inbox.put(None)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when to stop
    try:
        serve(Connection(int(sys.argv[1])), AtWork(int(sys.argv[2])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine is gone


if __name__ == "__main__":
    main()
