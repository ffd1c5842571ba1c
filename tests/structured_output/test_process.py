"""What the process of grammars makes of messages, without the process."""

from __future__ import annotations

from unittest.mock import Mock

from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.at_work import AtWork
from lora_serve.structured_output.process import GrammarServer
from lora_serve.structured_output.wire import Advance, Open
from lora_serve.structured_outputs import StructuredOutput

CONSTRAINT = StructuredOutput.of(regex="a+")


def test_tokens_that_come_before_an_answer_goes_on_in_a_new_process_are_followed() -> None:
    cache = GrammarCache(1, 1)
    grammar = Mock()
    grammar.matcher.return_value = Mock(is_finished=False, bitmask=lambda: b"1")
    cache.put(CONSTRAINT, grammar, 1)
    server = GrammarServer(Mock(), [Mock()], Answers(cache, 8, ()), cache, AtWork())
    server._take_in(Open("one", CONSTRAINT, True, (1, 2)))
    server._take_in(Advance((("one", (3,)),)))
    assert server._compute(server._turns.take()).num_tokens == 3
    assert not server._turns
