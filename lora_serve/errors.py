"""Every error a user can cause, as one tree; `server/http/errors.py` turns it into HTTP statuses.

Each message names the value, the limit and what to do. `assert` is for what cannot happen.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TypeVar


class LoraServeError(Exception):
    """Base of all errors that lora-serve raises on purpose."""


AnyError = TypeVar("AnyError", bound=LoraServeError)


def without_frames(error: AnyError) -> AnyError:
    """The error as a value to be kept: without the frames that it went through, and its causes.

    Frames hold what was worked on, which may be all of an adapter. One of them that keeps the error
    is in a cycle with it, and an engine collects cycles late.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class InvalidRequestError(LoraServeError):
    """A request that can never succeed as written. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt, or prompt and answer together, exceed the model or the KV cache."""


class ConfigError(LoraServeError):
    """A combination of settings, or a model directory, that cannot be served."""


class NotFoundError(LoraServeError):
    """What was named does not exist. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


ASK_FOR_BASE_MODEL = "Ask for the base model"  # whose name the API process adds


class AdapterNotFoundError(NotFoundError):
    """No adapter, and no served model, has this name; or no adapter lies at this path."""

    @classmethod
    def of_model(cls, model: str, known: Collection[str], remedy: str = "") -> AdapterNotFoundError:
        """No model has this name. known: names that there are, of which the first are told."""
        few = ", ".join(f"`{name}`" for name in islice(known, 3))
        more = f" and {len(known) - 3} more" if len(known) > 3 else ""
        there_is = f" There is {few}{more}." if few else ""
        return cls(f"The model `{model}` does not exist.{there_is}{remedy}", "model")


class HubNotAllowedError(AdapterNotFoundError):
    """No directory has this name, and callers may not have the hub asked for it."""


class AdapterError(LoraServeError):
    """An adapter that cannot be loaded, replaced or used. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class AdapterFormatError(AdapterError):
    """A checkpoint that cannot be served. Lists its findings, not only the first.

    A file can hold thousands of them: past the first MAX_FINDINGS, they are counted.
    """

    MAX_FINDINGS = 32

    def __init__(self, path: str, findings: list[str]) -> None:
        assert findings, f"{path}: refused without a finding"
        told = findings[: self.MAX_FINDINGS]
        if len(findings) > len(told):
            told.append(f"and {len(findings) - len(told)} more")
        super().__init__(f"{path}: " + "; ".join(told))
        self.findings = told


class AdapterExistsError(AdapterError):
    """The name is taken and `load_inplace` was not set."""


class AdapterChangedError(AdapterError):
    """Files that no longer hold, or never held, the bytes that were asked for.

    found_digest: of the bytes that they hold, in hexadecimal; "" if that is not known.
    """

    def __init__(self, message: str, param: str | None = None, found_digest: str = "") -> None:
        super().__init__(message, param)
        self.found_digest = found_digest


class AdapterUnavailableError(AdapterError):
    """An adapter's disk or hub did not answer in time; the same call may succeed later."""


class CatalogUnavailableError(LoraServeError):
    """The store of --lora-catalog cannot be asked now; the same call may succeed later."""


class CatalogRefusedError(CatalogUnavailableError):
    """The store has answered that it takes no change now: nothing was changed."""


class ChangeUnknownError(CatalogUnavailableError):
    """The catalog was lost in a change: it was made, or may have been, and not all is known of it.

    digest: what the name stands for now, "" for nothing; None if it may also be as it was.
    """

    def __init__(self, message: str, digest: str | None = None) -> None:
        super().__init__(message)
        self.digest = digest


class UnauthorizedError(LoraServeError):
    """No API key, or an unknown one."""


class ForbiddenError(LoraServeError):
    """A known API key that lacks the admin scope."""


class OverloadedError(LoraServeError):
    """The queue is full. `retry_after_seconds` is a hint for the client."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NotForgottenError(LoraServeError):
    """KV was reset in this engine, but a tier has not confirmed that it has forgotten it."""


class PauseEndedError(LoraServeError):
    """A pause was ended by another caller before it had come about."""


class RequestAbortedError(LoraServeError):
    """A call ended a request whose answer cannot be told in part; it may be sent again."""


class KVLoadError(LoraServeError):
    """A tier had a request's KV and could not give it, and recomputing was not allowed."""


class EngineDeadError(LoraServeError):
    """The engine process is gone; `/health` fails too."""


class RankLostError(EngineDeadError):
    """A rank of a divided model has ended or hangs, and with it the engine."""


class GrammarUnavailableError(LoraServeError):
    """The process of grammars gives no masks; the same call may succeed later."""


class SlowReaderError(LoraServeError):
    """A stream was read so slowly that its answer was given up."""


class RequestFailedError(LoraServeError):
    """Answering this very request fails, each time; the fault is the server's."""
