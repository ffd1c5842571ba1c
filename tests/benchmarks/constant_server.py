"""Says the same tokens to everybody: python constant_server.py PORT."""

import sys

from benchmarks.peers.servers.token_server import Emit, serve_tokens


class Constant:
    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        for token in range(max_tokens):
            emit(token)


serve_tokens(Constant(), int(sys.argv[1]))
