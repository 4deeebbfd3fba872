"""Text for models whose folder has a tokenizer: chat template to ids, ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from orchard_api.chat_template import compile_template, read_template_files
from orchard_api.errors import ConfigError, PolicyServerError


class RequestError(PolicyServerError):
    """A request that this server can't serve; a retry does not mend it."""


class TextCodec:
    """The tokenizer and chat template of a model folder.

    Args:
        tokenizer: the folder's tokenizer.
        template: the chat template's Jinja source, or None.
        tokens: named special tokens that templates use.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._render = None if template is None else compile_template(template)

    @classmethod
    def load(cls, folder: Path) -> TextCodec | None:
        """The codec of a folder, or None where it has no `tokenizer.json`.

        Raises:
            ConfigError: a file is broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        files = read_template_files(folder)
        try:
            return cls(Tokenizer.from_file(str(path)), files.source, files.tokens)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"the tokenizer of {folder} can't be used: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it become their ids, and none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, number: int) -> str:
        """How one id is written in the vocabulary."""
        text: str | None = self._tokenizer.id_to_token(number)
        return f"token_id:{number}" if text is None else text

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, **options: Any
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer.

        Raises:
            RequestError: there is no template, or it refuses the conversation.
        """
        if self._render is None:
            raise RequestError("this model's folder has no chat template")
        variables: dict[str, Any] = {"add_generation_prompt": True, **self._tokens, **options}
        try:
            text = self._render(messages=list(messages), tools=tools or None, documents=None, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        return self.encode(text)
