"""Text to token ids and back, as the model's own tokenizer does it.

Never changes a setting of the tokenizer after loading: worker threads share it, and the library
refuses a change while another thread encodes ("Already borrowed").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers.models import BPE

from lora_serve.chat.template import render_chat
from lora_serve.errors import ConfigError, InvalidRequestError
from lora_serve.gguf.header import forget_header
from lora_serve.gguf.location import gguf_file
from lora_serve.text.generation_config import (
    end_token_ids,
    read_model_json,
    sampling_defaults,
    vocabulary_size,
)
from lora_serve.text.gguf_tokenizer import gguf_tokenizer
from lora_serve.text.gguf_vocabulary import GgufVocabulary
from lora_serve.text.request_templates import SECONDS, Rendering, RequestTemplates
from lora_serve.text.token_bytes import token_bytes
from lora_serve.text.tokenizer_parts import TokenizerParts

MAX_CHARS_OF_ANY_TOKEN = 1024  # where a vocabulary does not tell; none has a longer token


class Tokenizer:
    """A model's tokenizer, its end tokens and its default sampling settings.

    eos_token_ids: of the tokenizer, generation_config.json and config.json, without duplicates.
    warnings: what users must know of these files.
    generation_defaults: settings of generation_config.json, by SamplingParams' names.
    tokenizer_class: as transformers calls it.
    vocab_size: how many tokens have a text; a model's logits may have more rows.
    special_token_ids: those that decoding with skip_special_tokens leaves out.
    """

    def __init__(
        self, source: str, revision: str | None = None, *, model: str | None = None
    ) -> None:
        """Load everything.

        Args:
            source: a directory, a hub id, or a GGUF file as `gguf_file` finds it.
            revision: branch, tag or commit of a hub repository.
            model: where generation_config.json and config.json lie, if not at `source`.

        Raises:
            ConfigError: in one line, why there is no tokenizer to be had there.
        """
        self.source = source
        parts = _parts(source, revision)
        self._backend, self._template = parts.backend, parts.template
        self.tokenizer_class = parts.class_name
        self._backend.no_truncation()
        self._backend.no_padding()
        is_other = model is not None and model != source
        generation, config = _model_settings(model or source, revision, is_other)
        forget_header()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        ends = end_token_ids(
            {
                "the tokenizer": {"eos_token_id": parts.eos_token_id},
                "generation_config.json": generation,
                "config.json": config,
            },
            vocabulary_size(config) or self.vocab_size,
        )
        self.eos_token_ids, self.warnings = ends.ids, ends.warnings
        self.generation_defaults: Mapping[str, float] = MappingProxyType(
            sampling_defaults(generation)
        )
        added = self._backend.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.special_token_ids = frozenset(special.values())
        self._special_token_ids = MappingProxyType(special)  # by text
        self._request_templates = RequestTemplates()

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Most characters that one token may stand for. The first call reads the vocabulary.

        A token for what is unknown may stand for any number, so where there is one this is a bound
        that no sensible text reaches.
        """
        model = self._backend.model
        knows_all = isinstance(model, BPE) and (model.unk_token is None or model.byte_fallback)
        return max(map(len, self._backend.get_vocab())) if knows_all else MAX_CHARS_OF_ANY_TOKEN

    def to_json(self) -> str:
        """All of the tokenizer, as the tokenizers library writes and reads it."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; other threads run meanwhile.

        Raises:
            InvalidRequestError: the text is not Unicode (JSON can smuggle in half a character), or
                the tokenizer's own patterns take too long with it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds a lone surrogate at character {error.start}, which no encoding "
                "can write; remove it",
                "prompt",
            ) from error
        try:
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library; it has no other base
                raise
            raise InvalidRequestError(
                f"the model's tokenizer gives up on this text: {str(error)[:200]}", "prompt"
            ) from None
        return encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know have none.

        Raises:
            InvalidRequestError: an id is negative, or far beyond any vocabulary.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequestError(
                f"token ids must be in [0, {self.vocab_size}), got "
                f"{min(token_ids)} to {max(token_ids)}",
                "tokens",
            ) from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template writes all special tokens itself.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        max_chars: int | None = None,
        trusts_template: bool = True,
    ) -> str:
        """A conversation as text, to be encoded without special tokens: it has them.

        trusts_template: or `chat_template` is a client's, which may take little time and memory.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages, or writes more
                than `max_chars`, or takes more than it may.
            OverloadedError: no process for a client's template can be started.
        """
        if not trusts_template:
            return self._request_templates.render(
                Rendering(
                    self.template_source(chat_template),
                    messages,
                    tools,
                    {**self._template.special_tokens, **(template_kwargs or {})},
                    add_generation_prompt,
                    continue_final_message,
                    max_chars,
                )
            )
        return render_chat(
            self._template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            template_kwargs=template_kwargs or {},
            max_chars=max_chars,
            max_seconds=SECONDS,
        )

    @property
    def chat_template(self) -> str | None:
        """The model's own; None if it has none, or several by name."""
        return self._template.own if isinstance(self._template.own, str) else None

    def special_token(self, purpose: str) -> str | None:
        """The text of the token for a purpose: "bos", "eos", "pad" or "unk"; None without one."""
        return self._template.special_tokens.get(f"{purpose}_token")

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Each token added to the vocabulary, by id: its text, and whether it is special."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: (token.content, token.special) for token_id, token in added.items()}

    def token_piece(self, token_id: int) -> str:
        """One token as the vocabulary writes it, such as "Ġthe"; "" if unknown."""
        return self._backend.id_to_token(token_id) or ""

    def template_source(self, chat_template: str | None = None) -> str:
        """The text of the template that chats with tools are written with; "" if there is none."""
        if not (chat_template or self._template.own):
            return ""
        try:
            return self._template.source(chat_template, has_tools=True)
        except ValueError:  # several, of which none is for this
            return ""

    def special_token_id(self, text: str) -> int | None:
        """The special token with this text, which decoding with skip_special_tokens leaves out."""
        return self._special_token_ids.get(text)

    def token_text(self, token_id: int) -> str:
        """One token within a text; U+FFFD where it is a part of a character, "" if unknown.

        Decoders may drop a space at the start of a text, so this is what the token adds to itself.
        """
        alone = self.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in alone:  # twice, its parts might join to a character
            return alone
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes within a text, also where they are only a part of a character."""
        return token_bytes(self.token_piece(token_id), self.token_text(token_id))


def _model_settings(
    source: str, revision: str | None, is_other: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """What the model's generation_config.json says, and its config.json.

    is_other: whether the tokenizer is another's. Then a GGUF file's may be one that cannot be used,
    and says nothing.
    """
    file = gguf_file(source, revision)
    if file is not None:
        try:
            return {"eos_token_id": GgufVocabulary(file).end_token_ids()}, {}
        except ConfigError:
            if not is_other:
                raise
            return {}, {}
    generation = read_model_json(source, revision, "generation_config.json")
    return generation, read_model_json(source, revision, "config.json")


def _parts(source: str, revision: str | None) -> TokenizerParts:
    file = gguf_file(source, revision)
    if file is not None:
        return gguf_tokenizer(file)
    from lora_serve.text.transformers_tokenizer import transformers_tokenizer  # takes a second

    return transformers_tokenizer(source, revision)
