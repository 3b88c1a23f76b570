"""Constraints on the output: OpenAI's and vLLM's ways to say them, one wire form."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema

from sluice.v1 import sampling_pb2
from sluice_router.openai_schema import MAX_STRUCTURE_CHARACTERS, FieldError, quote

if TYPE_CHECKING:
    from sluice_router.openai_schema import SamplingFields


def read_structured_output(body: SamplingFields) -> sampling_pb2.StructuredOutput | None:
    """Reads the one constraint of a request.

    Returns:
        The constraint, or None.

    Raises:
        FieldError: More than one, or one that cannot be.
    """
    constraints = [*_from_response_format(body), *_from_guided(body), *_from_structured_outputs(body)]
    if not constraints:
        return None
    if len(constraints) > 1:
        names = " and ".join(field for field, _, _ in constraints)
        raise FieldError(constraints[1][0], f"only one constraint on the output is possible, not {names}")
    field, kind, value = constraints[0]
    return _build(field, kind, value)


def _from_response_format(body: SamplingFields) -> list[tuple[str, str, Any]]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", "json_object", True)]
    assert wanted.json_schema is not None, "checked by the model"
    return [("response_format.json_schema.schema", "json", wanted.json_schema.json_schema)]


def _from_guided(body: SamplingFields) -> list[tuple[str, str, Any]]:
    given = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    return [(f"guided_{kind}", kind, value) for kind, value in given.items() if value is not None]


def _from_structured_outputs(body: SamplingFields) -> list[tuple[str, str, Any]]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    given = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": wanted.json_object or None,
    }
    return [(f"structured_outputs.{kind}", kind, value) for kind, value in given.items() if value is not None]


def _build(field: str, kind: str, value: Any) -> sampling_pb2.StructuredOutput:
    if kind == "json":
        return sampling_pb2.StructuredOutput(json_schema=_check_schema(field, value))
    if kind == "regex":
        return sampling_pb2.StructuredOutput(regex=_check_regex(field, value))
    if kind == "choice":
        if not all(value):
            raise FieldError(field, f"{field}: a choice is empty")
        return sampling_pb2.StructuredOutput(choices=sampling_pb2.StructuredOutput.Choices(values=value))
    if kind == "grammar":
        return sampling_pb2.StructuredOutput(grammar=value)
    return sampling_pb2.StructuredOutput(json_object=True)


def _check_schema(field: str, value: str | dict[str, Any]) -> str:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise FieldError(field, f"{field}: not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise FieldError(field, f"{field}: a JSON schema is an object, not {quote(schema)}")
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise FieldError(field, f"{field}: not a JSON schema, at {error.json_path}: {quote(error.message)}") from error
    text = json.dumps(schema)
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise FieldError(field, f"{field}: at most {MAX_STRUCTURE_CHARACTERS} characters, not {len(text)}")
    return text


def _check_regex(field: str, value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise FieldError(field, f"{field}: not a regular expression: {error}, in {quote(value)}") from error
    return value
