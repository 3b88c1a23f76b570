"""Renders a conversation into a prompt with the model's own chat template, in jinja2's sandbox."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
TEMPLATE_FILE = "chat_template.jinja"
# What a template raises when the messages are not of the shape that it expects.
RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplateError(ValueError):
    """The model has no usable template, or its template refuses the messages."""


class ChatTemplate:
    """The compiled templates of a model.

    Args:
        templates: Sources by name; ``tool_use`` is taken when tools are given, else ``default``.
        special_tokens: ``bos_token``, ``eos_token`` and the like, as the templates name them.

    Raises:
        ChatTemplateError: A template does not compile.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _make_environment()
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Loads a model's templates.

        Args:
            directory: The model.
            tokenizer_config: Its ``tokenizer_config.json``.

        Returns:
            The templates, or None when the model has none.

        Raises:
            ChatTemplateError: A template does not compile.
        """
        templates = _read_sources(directory, tokenizer_config.get("chat_template"))
        return cls(templates, read_special_tokens(tokenizer_config)) if templates else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: In order; contents are strings.
            tools: Tools to describe to the model.
            add_generation_prompt: Whether to open the assistant's turn.
            variables: More variables for the template.

        Returns:
            The prompt, special tokens included.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        name = TOOL_NAME if tools and TOOL_NAME in self._templates else DEFAULT_NAME
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(
                **{
                    **self._special_tokens,
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RENDERING_ERRORS as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error


def read_special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Reads the named special tokens (``bos_token``: its text) of a ``tokenizer_config.json``."""
    tokens = {}
    for key, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _read_sources(directory: Path, configured: object) -> dict[str, str]:
    # As Hugging Face: a file of its own goes before the entry in the configuration.
    file = directory / TEMPLATE_FILE
    if file.is_file():
        return {DEFAULT_NAME: file.read_text()}
    if isinstance(configured, str):
        return {DEFAULT_NAME: configured}
    if isinstance(configured, list):
        return {entry["name"]: entry["template"] for entry in configured}
    return {}


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's part for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - declared as such by jinja2

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model expects.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
