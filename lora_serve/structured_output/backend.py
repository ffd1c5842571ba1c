"""The door to libraries that know grammars, and the one table that names them.

A mask is a function of the grammar and of the tokens of the answer so far, and of nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from lora_serve.errors import ConfigError, InvalidRequestError
from lora_serve.structured_outputs import StructuredOutput

BACKENDS = {
    "llguidance": "lora_serve.structured_output.llguidance",
    "xgrammar": "lora_serve.structured_output.xgrammar",
}
_OTHER = "leave it out, or start the server with --structured-outputs-config.backend llguidance"
_MAX_REASON_CHARS = 200


class Vocabulary(msgspec.Struct, frozen=True):
    """What the tokens are.

    tokenizer_json: as the tokenizers library writes it. size: of the model's logits, which may be
        more than the tokenizer knows. eos_token_ids: allowed where the grammar may end.
        token_bytes: what a token adds to a text; nothing where no token has the id.
        special_token_ids: of tokens that add nothing to an answer's text.
    """

    tokenizer_json: str
    size: int
    eos_token_ids: tuple[int, ...]
    token_bytes: Callable[[int], bytes]
    special_token_ids: Collection[int]


class Matcher(Protocol):
    """One answer on its way through a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, and no token may follow."""

    def bitmask(self) -> bytes:
        """Which tokens may be next, as `SampleInput.bitmask` has it.

        Raises:
            InvalidRequestError: the grammar is too complex here.
        """

    def accept(self, token_id: int) -> None:
        """Go on with a token that the last mask allowed.

        Raises:
            InvalidRequestError: as `bitmask`, or the grammar does not allow this token.
        """

    def fork(self) -> Matcher:
        """Another one that has the same tokens, and goes on by itself."""


class Grammar(Protocol):
    def matcher(self) -> Matcher:
        """Begin an answer."""


class Backend(Protocol):
    """One library with one vocabulary; each module of the table has load(vocabulary) -> Backend."""

    def compile(self, constraint: StructuredOutput) -> Grammar:
        """A grammar that answers can follow.

        It may take any time and memory, and even end the process, so it is tried in another first.

        Raises:
            InvalidRequestError: it is malformed, or asks for what cannot be enforced.
        """


def require_installed(name: str) -> None:
    """Raise ConfigError, in one line, for a library that cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"--structured-outputs-config.backend {name} needs the library {name}: "
            f"pip install 'lora-serve[{name}]'"
        )


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    backend: Backend = importlib.import_module(BACKENDS[name]).load(vocabulary)
    return backend


def refusal(reason: str, *, knows_other: bool = False) -> InvalidRequestError:
    """The error for a constraint of which no grammar can be made.

    knows_other: it may be one for llguidance.
    """
    reason = " ".join(reason.split())
    if len(reason) > _MAX_REASON_CHARS:
        reason = reason[:_MAX_REASON_CHARS] + "…"
    remedy = _OTHER if knows_other else "change or simplify it"
    return InvalidRequestError(
        f"structured_outputs: no grammar can be made of it: {reason}; {remedy}",
        "structured_outputs",
    )
