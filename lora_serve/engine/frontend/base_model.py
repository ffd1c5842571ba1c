"""Whether an adapter was plainly trained on another model than the one that is served.

Only names are compared, so nothing is ever refused for it: one model has many paths and names. What
fits the model's shapes but not its weights would be served without an error, and answer nonsense.
"""

from __future__ import annotations

import re
from pathlib import Path

from lora_serve.config import ModelConfig
from lora_serve.messages import AdapterInfo

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def other_base_model(model: ModelConfig, adapter: AdapterInfo) -> str | None:
    """A warning, if both name repositories of the hub, and these are called differently."""
    trained, served = adapter.base_model, model.model
    if not (_is_on_hub(trained) and _is_on_hub(served)):
        return None
    if _repository(trained) in map(_repository, (served, *model.served_model_name)):
        return None
    return (
        f"the adapter {adapter.name!r} says that it was trained on {trained}, and the model here "
        f"is {served}; if it is another one, answers will be wrong"
    )


def _is_on_hub(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).is_dir()


def _repository(hub_id: str) -> str:
    """The id without its organisation, since many offer copies."""
    return hub_id.rpartition("/")[2].lower()
