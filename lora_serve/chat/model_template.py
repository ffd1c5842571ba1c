"""What a model's tokenizer brings to its chats: its templates, and the tokens that they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_WITH_TOOLS, _DEFAULT = "tool_use", "default"


@dataclass(frozen=True, slots=True)
class ModelTemplate:
    """own: a text; or several, by name; None where the model has none.

    special_tokens: variables of all templates, such as bos_token.
    """

    own: str | Mapping[str, str] | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def source(self, given: str | None, *, has_tools: bool) -> str:
        """The template to render: `given`, which may be the name of an own one, or the model's.

        Raises:
            ValueError: there is none, or none of several is for this.
        """
        if self.own is None or isinstance(self.own, str):
            source = self.own if given is None else given
            if source is None:
                raise ValueError("the model has no chat template")
            return source
        if given is not None:
            return self.own.get(given, given)
        for name in (_WITH_TOOLS, _DEFAULT) if has_tools else (_DEFAULT,):
            if name in self.own:
                return self.own[name]
        raise ValueError(
            f"the model has several chat templates, {', '.join(sorted(self.own))}, and no "
            f"{_DEFAULT}: name one"
        )
