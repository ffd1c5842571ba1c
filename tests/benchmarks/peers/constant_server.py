"""Gives the same tokens to all requests, or with "adapted" others to those that name an adapter.

Called as python constant_server.py PORT [adapted].
"""

import sys

from benchmarks.peers.servers.token_server import Emit, serve_tokens


class Constant:
    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        first = 7 if adapter and "adapted" in sys.argv else 0
        for token in range(first, first + max_tokens):
            emit(token)


serve_tokens(Constant(), int(sys.argv[1]))
