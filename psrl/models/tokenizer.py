"""Chat messages to token ids and back, without importing torch or transformers (0.05 s instead of 3 s a process).

Reads the `tokenizer.json` and the chat template of a Hugging Face directory. A model without a `tokenizer.json` is
read through `transformers.AutoTokenizer`, at that price.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from psrl.config.errors import ConfigError

Messages = Sequence[dict[str, Any]]


class ChatTokenizer(Protocol):
    """What tasks, agent loops and rewards need from a tokenizer."""

    eos_token_id: int | None
    pad_token_id: int | None
    vocab_size: int

    def encode_chat(self, messages: Messages) -> list[int]:
        """Ids of the conversation, ending where the model's turn begins. ConfigError if the template refuses it."""
        ...

    def render_chat(self, messages: Messages, tools: Messages = (), add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it, with the definitions of `tools`. ConfigError if it refuses it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of these ids without special tokens."""
        ...

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Text of each."""
        ...


def load_tokenizer(path: Path | str) -> ChatTokenizer:
    """The tokenizer of a model directory."""
    directory = Path(path)
    return FileTokenizer(directory) if (directory / "tokenizer.json").is_file() else TransformersTokenizer(directory)


class FileTokenizer:
    """`tokenizer.json` through the `tokenizers` library; the chat template as transformers renders it."""

    def __init__(self, directory: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        settings = _read_json(directory / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _content(settings[name]) for name in names if settings.get(name) is not None}
        self._template = _compile(_chat_template(directory, settings), directory)
        self.eos_token_id = self._id("eos_token")
        self.pad_token_id = self._id("pad_token")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._special[name]) if name in self._special else None

    def encode_chat(self, messages: Messages) -> list[int]:
        text = self.render_chat(messages)
        return (
            self._tokenizer.encode(text, add_special_tokens=True).ids if self._template is None else self.encode(text)
        )

    def render_chat(self, messages: Messages, tools: Messages = (), add_generation_prompt: bool = True) -> str:
        if self._template is None:
            return _plain(messages)
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                **self._special,
            )
        except (TemplateError, TypeError) as error:
            raise _refused(messages, error) from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip_special_tokens)


class TransformersTokenizer:
    """`AutoTokenizer`, for models that have no `tokenizer.json`."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.pad_token_id: int | None = self._tokenizer.pad_token_id
        self.vocab_size = len(self._tokenizer)

    def encode_chat(self, messages: Messages) -> list[int]:
        if not self._tokenizer.chat_template:
            return self._tokenizer(_plain(messages))["input_ids"]
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Messages, tools: Messages = (), add_generation_prompt: bool = True) -> str:
        if not self._tokenizer.chat_template:
            return _plain(messages)
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise _refused(messages, error) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)) for ids in sequences]


def _refused(messages: Messages, error: Exception) -> ConfigError:
    return ConfigError(f"The model's chat template refuses a prompt ({error}): {str(list(messages))[:200]}.")


def _plain(messages: Messages) -> str:
    """A conversation for a model without a chat template."""
    return "\n".join(str(message["content"]) for message in messages)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str:
    """A special token is written as a string or as {"content": string, ...}."""
    return token["content"] if isinstance(token, dict) else token


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own wins over the entry in tokenizer_config.json; of several named templates, "default"."""
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _compile(template: str | None, directory: Path) -> Any:
    if template is None:
        return None
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ConfigError(f"The chat template in {directory} cannot be read: {error}.") from error
