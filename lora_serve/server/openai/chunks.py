"""Which deltas become chunks of a stream, and which chunks hold the usage."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from lora_serve.outputs import OutputDelta
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.openai.answers import Usage
from lora_serve.server.openai.protocol import GenerationBody
from lora_serve.server.openai.usage import UsageCounter


class ChunkPolicy:
    """What one body's stream_options and fields ask for.

    include_usage: whether a last chunk without choices holds the usage.
    """

    def __init__(
        self, body: GenerationBody, params: SamplingParams, *, always_includes_usage: bool = False
    ) -> None:
        """always_includes_usage: in every chunk, whatever the body says."""
        options = body.stream_options
        self.include_usage = always_includes_usage or (
            options is not None and bool(options.include_usage)
        )
        self._always_usage = always_includes_usage or (
            self.include_usage and options is not None and bool(options.continuous_usage_stats)
        )
        self._shows_tokens = params.logprobs is not None or bool(body.return_token_ids)

    def sends(self, delta: OutputDelta, *, has_text: bool) -> bool:
        """Whether a chunk for `delta` would hold anything; its text may still be held back."""
        return (
            has_text
            or delta.finish_reason is not None
            or self._always_usage
            or (self._shows_tokens and bool(delta.token_ids))
        )

    def usage(self, usage: UsageCounter) -> Usage | UnsetType | None:
        """A chunk's usage so far, null if only the last chunk holds it, or no such field."""
        if self._always_usage:
            return usage.usage
        return None if self.include_usage else UNSET
