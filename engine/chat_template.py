"""Chat templates: which one a config names, the messages they take, and the sandbox they run in.

Owns the accepted forms of messages and what transformers adds to jinja. Knows nothing of tokens. Invariant: a
template, which is code that came with a download, never reaches Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """The messages with their contents as text.

    Raises:
        ValueError: there is none, or one lacks its role or its text.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"messages must be a list of at least one {{'role', 'content'}}, got {messages!r}"
        )
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{i}]: a message is a dict with 'role' and 'content', got {message!r}"
            )
        plain.append({**message, "content": _text_of(message.get("content"), f"messages[{i}]")})
    return plain


def _text_of(content: object, name: str) -> str:
    """The text of a message: a str, or the text parts of a list joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        raise ValueError(
            f"{name}['content'] must be text or a list of {{'type': 'text', 'text': ...}}, got {content!r}"
        )
    for j, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{name}['content'][{j}] must be {{'type': 'text', 'text': ...}}, the only kind of part that is "
                f"supported, got {part!r}"
            )
    return "".join(part["text"] for part in content)


def default_template(template: object) -> str | None:
    """The ``chat_template`` of a config, or the one named "default" where there are several.

    Raises:
        ValueError: it is neither text nor a list of named texts.
    """
    if template is None or isinstance(template, str):
        return template
    named: Any = template
    if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):
        named = {entry.get("name"): entry.get("template") for entry in template}
    if not isinstance(named, Mapping) or not all(
        isinstance(value, str) for pair in named.items() for value in pair
    ):
        raise ValueError(
            f"chat_template must be text or a list of {{name, template}}, got {template!r}"
        )
    return named.get("default")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for trainers; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja's protocol)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(template: str) -> jinja2.Template:
    """In a sandbox: a template is code that came with a download."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    strftime_now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(template)
