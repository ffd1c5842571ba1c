"""What the API process remembers of a pause, so that a new engine process is paused as well."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.messages import Pause


class PauseRecord:
    """is_paused: from the call of a pause to the call that ends it.

    is_at_rest: no step is made until then, so that none is missed.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.is_at_rest = False

    def begin(self) -> None:
        """A pause is asked for. One that waits lets requests go on that an earlier one kept."""
        self.is_paused, self.is_at_rest = True, False

    def came_to_rest(self) -> None:
        """The pause was confirmed. It may have been ended since."""
        self.is_at_rest = self.is_paused

    def end(self) -> None:
        self.is_paused = self.is_at_rest = False

    def first_messages(self, call_id: int) -> Sequence[Pause]:
        """What a new engine has to know: of what it is sent nothing goes on before the end."""
        return [Pause(call_id, "keep")] if self.is_paused else []
