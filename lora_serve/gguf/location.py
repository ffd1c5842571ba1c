"""Which GGUF file a model's name means: one on this machine, or one of a repository of the hub.

On the hub a name is org/repo:QUANTISATION, as in vLLM, or org/repo:FILE.gguf.
"""

from __future__ import annotations

import re
from pathlib import Path

from lora_serve.errors import ConfigError

SUFFIX = ".gguf"
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):([\w./-]+)")


def hub_parts(model: str) -> tuple[str, str] | None:
    """The repository and the file, or its quantisation, of a name on the hub; None for others."""
    found = _ON_HUB.fullmatch(model)
    if found is None or Path(model).exists():
        return None
    repository, wanted = found.groups()
    return repository, wanted


def names_gguf(model: str) -> bool:
    """Whether it is the name of a GGUF file, here or on the hub, which may not be there."""
    return hub_parts(model) is not None or model.lower().endswith(SUFFIX)


def gguf_file(model: str, revision: str | None = None) -> Path | None:
    """The file that `model` means, fetched from the hub if it is there; None: it means no file.

    revision: branch, tag or commit of a repository.

    Raises:
        ConfigError: the repository has none, or several, or cannot be reached.
    """
    if parts := hub_parts(model):
        return _from_hub(*parts, revision)
    path = Path(model).expanduser()
    return path if model and path.is_file() else None


def _from_hub(repository: str, wanted: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if wanted.lower().endswith(SUFFIX):
        patterns = [wanted]
    else:
        # As converters name files: model-Q4_K_M.gguf, model.Q4_K_M.gguf, Q4_K_M/model-….gguf
        cases = dict.fromkeys((wanted, wanted.upper(), wanted.lower()))
        patterns = [form.format(case) for case in cases for form in ("*[-.]{}.gguf", "{}/*.gguf")]
    try:
        found = snapshot_download(repository, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {repository}:{wanted} could not be fetched from the hub: {error}"
        ) from error
    files = sorted({path for pattern in patterns for path in Path(found).glob(pattern)})
    if len(files) == 1:
        return files[0]
    names = ", ".join(str(path.relative_to(found)) for path in files)
    raise ConfigError(
        f"model {repository}:{wanted}: "
        + (f"{names} fit this name" if files else "the repository has no such GGUF file")
        + f"; name one file, as in {repository}:FILE.gguf"
    )
