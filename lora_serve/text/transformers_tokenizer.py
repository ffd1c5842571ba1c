"""Makes a tokenizer of a directory, or of a repository of the hub, as transformers reads it."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from lora_serve.chat.model_template import ModelTemplate
from lora_serve.errors import ConfigError
from lora_serve.text.generation_config import read_model_json
from lora_serve.text.normalizer_growth import check_growth
from lora_serve.text.tokenizer_files import check_tokenizer_directory
from lora_serve.text.tokenizer_parts import TokenizerParts


def transformers_tokenizer(source: str, revision: str | None) -> TokenizerParts:
    """The tokenizer, with its chat templates.

    Raises:
        ConfigError: in one line, why there is none.
    """
    tokenizer = _load(source, revision)
    return TokenizerParts(
        tokenizer.backend_tokenizer,
        ModelTemplate(tokenizer.chat_template, tokenizer.special_tokens_map),
        tokenizer.eos_token_id,
        type(tokenizer).__name__,
    )


def _plain_config(source: str, revision: str | None) -> PreTrainedConfig | None:
    """The model's config by which to choose the tokenizer's class; None: AutoTokenizer reads it.

    That imports the config's own class, and some of those torch._dynamo and Triton, which take
    seconds of a start and tell of leaks at its end. It is needed where the tokenizer's files name
    no class. Rotary positions are left out: no tokenizer asks for them, and a plain config refuses
    scalings that need its model's own.
    """
    if read_model_json(source, revision, "tokenizer_config.json").get("tokenizer_class") is None:
        return None
    config = read_model_json(source, revision, "config.json")
    if not config:
        return None
    known = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return PreTrainedConfig.from_dict({**known, "name_or_path": source})


def _load(source: str, revision: str | None) -> PreTrainedTokenizerFast:
    check_tokenizer_directory(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            config=_plain_config(source, revision),
            revision=revision,
            trust_remote_code=False,
        )
    except Exception as error:  # transformers has no base class for what a broken file raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"cannot load a tokenizer from {source}: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer of {source} is a {type(tokenizer).__name__}; only those with a "
            "tokenizer.json are served, save it once with transformers' save_pretrained"
        )
    backend = tokenizer.backend_tokenizer
    check_growth(backend, source)
    if backend.get_vocab_size() == len(backend.get_added_tokens_decoder()):
        raise ConfigError(  # transformers makes an empty one where it finds only a config.json
            f"the tokenizer of {source} has no tokens; is its tokenizer.json missing? "
            "--tokenizer may name another place"
        )
    return tokenizer
