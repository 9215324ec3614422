"""Text to token ids and back: a thin wrapper of ``tokenizers``, with chat templates and incremental decoding.

Owns what transformers' tokenizers add to ``tokenizer.json`` (special tokens and templates of
``tokenizer_config.json``), so that ids and texts equal theirs without importing transformers. Knows nothing of
models or requests. Invariant: the pieces of an ``IncrementalDetokenizer`` never hold half a character.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, decoders

from engine.chat_template import compile_template, default_template, plain_messages

_SPECIAL_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_HELD = 8  # tokens that a WindowDetokenizer holds back; a character has 4 bytes at most


class Tokenizer:
    """Encodes, decodes and renders chats as transformers' fast tokenizer of the same directory does.

    Args:
        backend: the tokenizer proper.
        config: contents of ``tokenizer_config.json``: special tokens and ``chat_template``.
            ``add_bos_token`` is not read, as in transformers 5: the file of the backend says what is added.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._special_tokens = {
            key: token
            for key in _SPECIAL_KEYS
            if (token := _content(key, config.get(key))) is not None
        }
        _add_special_tokens(backend, config, self._special_tokens.values())
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.chat_template: str | None = default_template(config.get("chat_template"))
        self._compiled: jinja2.Template | None = None
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._token_bytes: dict[int, bytes] = {}
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """From ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` (the last two optional).

        Raises:
            ValueError: a file is missing or damaged, by name.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path} does not exist; the directory needs a fast tokenizer's file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception for every fault of the file
            raise ValueError(f"{path} is damaged or of an unknown format: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config: dict[str, Any] = {}
        if config_path.exists() or config_path.is_symlink():
            try:
                config = json.loads(_read_text(config_path))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{config_path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(
                f"{config_path} holds a {type(config).__name__}, expected a JSON object"
            )
        template_path = directory / "chat_template.jinja"
        if template_path.exists() or template_path.is_symlink():
            config["chat_template"] = _read_text(template_path)
        try:
            return cls(backend, config)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{config_path}: {error}") from error

    def _id_of(self, key: str) -> int | None:
        token = self._special_tokens.get(key)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in the text become their ids.

        Raises:
            ValueError: not a str, or one with a lone surrogate, which no UTF-8 can hold.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ValueError(f"text must be a str without lone surrogates, got {text!r}") from error

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id is no integer from 0 to 2**32 - 1.
        """
        try:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token_ids must be a list of token ids: {error}") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        **template_arguments: Any,
    ) -> str:
        """The text that the model's chat template makes of a conversation.

        Args:
            messages: mappings with ``role`` and ``content``, which is text or parts {"type": "text", "text": ...}.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: refused; there is no parser of tool calls here.
            template_arguments: what else the template reads, such as ``enable_thinking``.

        Raises:
            ValueError: a message is malformed, there is no template, or it refuses the messages.
        """
        if tools:
            raise ValueError("tools are not supported; leave the argument out")
        if self.chat_template is None:
            raise ValueError("the model has no chat template; use generate with a text prompt")
        plain = plain_messages(messages)
        special = {
            key: token for key, token in self._special_tokens.items() if key in _SPECIAL_KEYS
        }
        try:
            if self._compiled is None:
                self._compiled = compile_template(self.chat_template)
            return self._compiled.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**special, **template_arguments},
            )
        except (
            Exception
        ) as error:  # a template is code that came with a download: it raises anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of ``render_chat``; the template has put the special tokens in."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **template_arguments,
        )
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, by the rule of the byte-level decoder; b"" for an id without token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id)
            found = self._token_bytes[token_id] = b"" if token is None else _byte_level(token)
        return found

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh decoder of one sequence."""
        if self._is_byte_level:
            return ByteDetokenizer(self, skip_special_tokens)
        return WindowDetokenizer(self, skip_special_tokens)


class ByteDetokenizer:
    """Incremental decoding of byte-level BPE: bytes of tokens through an incremental UTF-8 decoder.

    The pieces joined, with that of ``finish``, are exactly ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """Text that is complete now and was not before."""
        if token_id in self._skipped:
            return ""
        return self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that was never completed."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """Incremental decoding for any other decoder: decodes a short window and emits what has grown.

    Holds back text that ends with U+FFFD, as half a character does, for ``_MAX_HELD`` tokens at most, so that a push
    costs the same however long the text is. Equal to ``Tokenizer.decode`` of all ids unless bytes already shown turn
    out to belong to a run that is no UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._token = tokenizer.backend.id_to_token
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # ids that are shown, as left context, then those held back
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """Text that is complete now and was not before."""
        if token_id in self._skipped or self._token(token_id) is None:
            return ""
        self._window.append(token_id)
        piece = self._new_text()
        is_full = len(self._window) - self._num_shown > _MAX_HELD
        if not piece:
            if is_full:  # tokens without text; those held first stay, as the start of a text
                self._window.pop()
            return ""
        if piece.endswith("\ufffd") and not is_full:
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return piece

    def finish(self) -> str:
        """What was held back."""
        piece = self._new_text()
        self._num_shown = len(self._window)
        return piece

    def _new_text(self) -> str:
        shown = self._decode(self._window[: self._num_shown], skip_special_tokens=self._skip)
        text = self._decode(self._window, skip_special_tokens=self._skip)
        return text[len(shown) :]


IncrementalDetokenizer = ByteDetokenizer | WindowDetokenizer


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _content(key: str, token: object) -> str | None:
    """A special token is written as its text or as a record of an added token."""
    text: Any = token.get("content") if isinstance(token, Mapping) else token
    if token is not None and not isinstance(text, str):
        raise ValueError(f"{key} must be null, text or an object with content, got {token!r}")
    return text


def _added_tokens(config: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """``added_tokens_decoder``, checked, in the order of ids."""
    records = config.get("added_tokens_decoder")
    if records is not None and not isinstance(records, Mapping):
        raise ValueError(f"added_tokens_decoder must be an object id -> token, got {records!r}")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = []
    for key, record in (records or {}).items():
        name = f"added_tokens_decoder[{key!r}]"
        if not (isinstance(key, (str, int)) and str(key).isascii() and str(key).isdecimal()):
            raise ValueError(f"{name}: the key must be a token id, an integer from 0")
        if not isinstance(record, Mapping) or not isinstance(record.get("content"), str):
            raise ValueError(f"{name} must be an object with content, got {record!r}")
        given = {flag: record[flag] for flag in flags if flag in record}
        if wrong := [flag for flag, value in given.items() if not isinstance(value, bool)]:
            raise ValueError(f"{name}: {', '.join(wrong)} must be true or false, got {record!r}")
        found.append((int(key), AddedToken(record["content"], **given)))
    return sorted(found, key=lambda item: item[0])


def _add_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Iterable[str]
) -> None:
    """Make special what the config calls so and what it adds; ids stay as they are."""
    for token_id, token in _added_tokens(config):
        if backend.token_to_id(token.content) is None:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            if backend.token_to_id(token.content) != token_id:
                raise ValueError(
                    f"added_tokens_decoder gives {token.content!r} the id {token_id}, but the next free id of "
                    f"tokenizer.json is {backend.token_to_id(token.content)}"
                )
    known = backend.get_added_tokens_decoder().values()
    special = {token.content for token in known if token.special}
    missing = [
        token
        for token in dict.fromkeys(named)
        if token not in special and backend.token_to_id(token) is not None
    ]
    if missing:
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in missing]
        )


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable alphabet of bytes: printable Latin-1 stands for itself, the rest for 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(256 + i): byte for i, byte in enumerate(others)}
    return table | {chr(byte): byte for byte in printable}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level(token: str) -> bytes:
    """Bytes of a token; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
