"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``: types, and limits that do not depend on the model.

Names and defaults are OpenAI's and, beyond them, vLLM's. Every violation becomes one ``FieldError``.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_STRUCTURE_CHARACTERS = 64 * 1024
MAX_STRUCTURE_CHOICES = 1024
# Answers of one request: its prompts times n.
MAX_CHOICES = 128
# vLLM's way to ask for no seed.
NO_SEED = -1
# Bounds of an objective, as in the ServingCluster's CRD.
MAX_TTFT_MS = 600_000
MAX_TPOT_MS = 60_000
MAX_PRIORITY = 1000
MAX_NAME_CHARACTERS = 256
# A value is quoted in a message up to this length.
MAX_QUOTED_CHARACTERS = 80
# Type of the violation that names an unknown option.
UNKNOWN_OPTION = "unknown_option"

SizeCheck = Callable[[dict[str, Any]], None]
Schema = TypeVar("Schema", bound=BaseModel)
# What pydantic calls the members of our unions in a path.
UNION_MEMBERS = frozenset({"str"})
UNION_PREFIXES = ("list[", "dict[")
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]

# Fields of OpenAI or vLLM that are not served: refused unless they hold one of these values, which ask for nothing.
# Fields that nobody knows are ignored, and named to the client in ``x-sluice-ignored``.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "logprob_token_ids": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "priority": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "mm_processor_kwargs": (None,),
    "kv_transfer_params": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
}
UNSUPPORTED_HINTS = {"priority": "; use sluice.priority or x-sluice-priority (higher goes first)"}


class FieldError(ValueError):
    """A field of a request is wrong.

    Args:
        field: Its path, as ``messages[0].content``; empty for the body as a whole.
        message: Names the field, the value and the limit.
        code: OpenAI's error code.
    """

    def __init__(self, field: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class _Options(_Body):
    """Options each of which changes what the client gets: an unknown one is refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name in sorted(value.keys() - _known_names(cls)):
            # These ask for nothing.
            if value[name] is not None and value[name] is not False:
                context = {"name": name, "given": quote(value[name]), "known": ", ".join(sorted(_known_names(cls)))}
                raise PydanticCustomError(UNKNOWN_OPTION, "unknown", context)
        return value


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = None


class SluiceOptions(_Options):
    """The headers ``x-sluice-*`` for clients that can only set the body; they win over the headers."""

    slo_ttft_ms: int | None = Field(default=None, ge=1, le=MAX_TTFT_MS)
    slo_tpot_ms: int | None = Field(default=None, ge=1, le=MAX_TPOT_MS)
    slo_class: str | None = Field(default=None, max_length=MAX_NAME_CHARACTERS)
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class JsonSchemaFormat(_Options):
    """A named JSON schema, OpenAI's form."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    # Outputs keep to the schema either way.
    strict: bool | None = None


class ResponseFormat(_Options):
    """OpenAI's way to constrain an output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.json_schema is None):
            raise ValueError("type json_schema needs json_schema.schema")
        return self


class StructuredOutputs(_Options):
    """vLLM's way to constrain an output."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=MAX_STRUCTURE_CHOICES)
    grammar: Pattern | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class VllmDefault:
    """Value of a sampling field when neither client nor model says one."""

    value: float


class SamplingFields(_Body):
    """What both endpoints share.

    A field of the proto's ``SamplingParams`` is taken from the field of its name here.
    """

    model: str | None = Field(default=None, max_length=MAX_NAME_CHARACTERS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    min_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    temperature: Annotated[float | None, VllmDefault(1.0)] = Field(default=None, ge=0, le=2)
    top_p: Annotated[float | None, VllmDefault(1.0)] = Field(default=None, gt=0, le=1)
    top_k: Annotated[int | None, VllmDefault(0)] = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: Annotated[float | None, VllmDefault(0.0)] = Field(default=None, ge=0, le=1)
    presence_penalty: Annotated[Penalty | None, VllmDefault(0.0)] = None
    frequency_penalty: Annotated[Penalty | None, VllmDefault(0.0)] = None
    repetition_penalty: Annotated[float | None, VllmDefault(1.0)] = Field(default=None, gt=0, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: list[StopString] | None = Field(default=None, max_length=MAX_STOPS)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=MAX_LOGIT_BIAS)
    bad_words: list[BadWord] | None = Field(default=None, max_length=MAX_BAD_WORDS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Pattern | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, max_length=MAX_STRUCTURE_CHOICES)
    guided_grammar: Pattern | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    sluice: SluiceOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("seed")
    @classmethod
    def _drop_seed(cls, value: int | None) -> int | None:
        return None if value == NO_SEED else value

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None: no logprobs."""
        raise NotImplementedError

    @property
    def output_limit_tokens(self) -> int | None:
        """Most output tokens, if the client says so."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


VLLM_DEFAULTS = {
    name: mark.value
    for name, field in SamplingFields.model_fields.items()
    for mark in field.metadata
    if isinstance(mark, VllmDefault)
}


def _tell_prompt(value: object) -> str:
    """Tells the four forms of a prompt apart by the first item."""
    if not isinstance(value, list):
        return "str"
    first = value[0] if value else 0
    return "list[str]" if isinstance(first, str) else "list[list]" if isinstance(first, list) else "list[int]"


class CompletionBody(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[TokenId], Tag("list[int]")]
        | Annotated[list[str], Tag("list[str]")]
        | Annotated[list[list[TokenId]], Tag("list[list]")],
        Discriminator(_tell_prompt),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        num_prompts, n = len(self.list_prompts()), self.n or 1
        if num_prompts * n > MAX_CHOICES:
            raise ValueError(
                f"prompt has {num_prompts} prompts and n is {n}: at most {MAX_CHOICES} answers per request, "
                f"not {num_prompts * n}"
            )
        return self

    def list_prompts(self) -> list[tuple[str, str | list[int]]]:
        """Lists the prompts, each with the path of its field."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [("prompt", cast("str | list[int]", self.prompt))]
        return [(f"prompt[{index}]", cast("str | list[int]", prompt)) for index, prompt in enumerate(self.prompt)]

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None: no logprobs."""
        return self.logprobs


class ContentPart(_Body):
    """A part of a message's content."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _require_text(self) -> Self:
        if self.type != "text":
            raise ValueError(f"content of type {self.type!r} is not supported; only text is")
        if self.text is None:
            raise ValueError("a part of type text needs text")
        return self


class ChatMessage(_Body):
    """One message; what else it holds (name, tool calls) goes to the template as it is."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None

    def to_template(self) -> dict[str, Any]:
        """Returns the message as templates expect it: the content is one string."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _refuse_forced_tools(cls, value: object) -> object:
        if value not in (None, "none", "auto"):
            raise ValueError("forced tool calls are not supported; allowed are none and auto")
        return value

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token to report; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit_tokens(self) -> int | None:
        """Most output tokens; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        """The field that says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


_QUOTER = reprlib.Repr()
_QUOTER.maxstring = _QUOTER.maxlong = _QUOTER.maxother = 2 * MAX_QUOTED_CHARACTERS


def parse_completion(body: bytes, check_size: SizeCheck) -> tuple[CompletionBody, list[str]]:
    """Reads the body of a completion request.

    Args:
        body: JSON.
        check_size: Checks the size of the prompt before all else, or raises ``FieldError``.

    Returns:
        The checked fields, and the names of the ignored ones.

    Raises:
        FieldError: The body or a field is wrong.
    """
    fields = _read_object(body)
    check_size(fields)
    return check(CompletionBody, fields), find_ignored(CompletionBody, fields)


def parse_chat(body: bytes, check_size: SizeCheck) -> tuple[ChatBody, list[str]]:
    """Reads the body of a chat request; see ``parse_completion``."""
    fields = _read_object(body)
    check_size(fields)
    return check(ChatBody, fields), find_ignored(ChatBody, fields)


def find_ignored(schema: type[SamplingFields], fields: dict[str, Any]) -> list[str]:
    """Names the fields that nobody here knows, as ``stream_options.x``, sorted."""
    names = fields.keys() - _known_names(schema) - UNSUPPORTED.keys()
    for name, part in _list_parts(schema).items():
        given = fields.get(name)
        if isinstance(given, dict):
            names |= {f"{name}.{inner}" for inner in given.keys() - _known_names(part)}
    return sorted(names)


@functools.cache
def _known_names(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


@functools.cache
def _list_parts(schema: type[BaseModel]) -> dict[str, type[_Body]]:
    """Lists the fields that are objects whose unknown fields are ignored."""
    return {
        name: part
        for name, field in schema.model_fields.items()
        for part in get_args(field.annotation)
        if isinstance(part, type) and issubclass(part, _Body) and not issubclass(part, _Options)
    }


def quote(value: object) -> str:
    """Quotes a client's value for a message, cut to a readable length."""
    text = _QUOTER.repr(value)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "..."


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise FieldError("", f"the body is not valid JSON: {error}", "invalid_json") from error
    if not isinstance(fields, dict):
        raise FieldError("", f"the body must be a JSON object, not {quote(fields)}", "invalid_json")
    if UNSUPPORTED.keys().isdisjoint(fields):
        return fields
    for name, neutral in UNSUPPORTED.items():
        # 1 == True in Python; JSON's true is not a number.
        value = fields.get(name)
        if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in neutral):
            hint = UNSUPPORTED_HINTS.get(name, "")
            raise FieldError(name, f"{name} is not supported (got {quote(value)}){hint}", "unsupported_parameter")
    return fields


def check(schema: type[Schema], fields: dict[str, Any]) -> Schema:
    """Checks fields against a body's model.

    Raises:
        FieldError: The first violation.
    """
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise explain(error) from error


def explain(error: ValidationError) -> FieldError:
    """Turns a violation into the client's terms: of the first field, and of the union member that matched furthest."""
    errors = error.errors(include_url=False)
    first = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    field = _format_path(first["loc"])
    if first["type"] == UNKNOWN_OPTION:
        unknown = first["ctx"]
        field = _format_path((*first["loc"], unknown["name"]))
        message = f"{field} is not supported (got {unknown['given']}); supported are {unknown['known']}"
        return FieldError(field, message, "unsupported_parameter")
    if first["type"] == "missing":
        return FieldError(field, f"{field} is required", "missing_required_parameter")
    if not field:
        return FieldError(reason.split(" ", 1)[0], reason)
    return FieldError(field, f"{field}: {reason[:1].lower()}{reason[1:]}, not {quote(first['input'])}")


def _format_path(location: tuple[int | str, ...]) -> str:
    """Writes a path as ``messages[0].content``, without pydantic's names of a union's members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif not (part in UNION_MEMBERS or part.startswith(UNION_PREFIXES)):
            is_plain = part.isascii() and part.isprintable() and len(part) <= MAX_QUOTED_CHARACTERS
            path += f".{part if is_plain else ascii(part[:MAX_QUOTED_CHARACTERS])}"
    return path
