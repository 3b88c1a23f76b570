"""Constraints on the output: OpenAI's and vLLM's ways to say them, one wire form."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema

from sluice.v1 import sampling_pb2
from sluice_router.api.openai_schema import MAX_STRUCTURE_CHARACTERS, FieldError, quote

if TYPE_CHECKING:
    from sluice_router.api.openai_schema import SamplingFields


Constraint = tuple[str, str, Any]


def find_constraint(body: SamplingFields) -> Constraint | None:
    """Finds the one constraint of a request.

    Returns:
        Its field, its kind and its value, unchecked; or None.

    Raises:
        FieldError: There is more than one.
    """
    constraints = [*_from_response_format(body), *_from_guided(body), *_from_structured_outputs(body)]
    if len(constraints) > 1:
        names = " and ".join(field for field, _, _ in constraints)
        raise FieldError(constraints[1][0], f"only one constraint on the output is possible, not {names}")
    return constraints[0] if constraints else None


def check_constraint(constraint: Constraint) -> sampling_pb2.StructuredOutput:
    """Checks a constraint and brings it into the wire's form. Large ones take long: call it off the event loop.

    Raises:
        FieldError: It cannot be.
    """
    field, kind, value = constraint
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


def _from_response_format(body: SamplingFields) -> list[Constraint]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", "json_object", True)]
    assert wanted.json_schema is not None, "checked by the model"
    return [("response_format.json_schema.schema", "json", wanted.json_schema.json_schema)]


def _from_guided(body: SamplingFields) -> list[Constraint]:
    given = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    return [(f"guided_{kind}", kind, value) for kind, value in given.items() if value is not None]


def _from_structured_outputs(body: SamplingFields) -> list[Constraint]:
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


def _check_schema(field: str, value: str | dict[str, Any]) -> str:
    schema = _read_schema(field, value)
    if not isinstance(schema, dict | bool):
        raise FieldError(field, f"{field}: a JSON schema is an object, not {quote(schema)}")
    text = json.dumps(schema)
    if len(text) > MAX_STRUCTURE_CHARACTERS:
        raise FieldError(field, f"{field}: at most {MAX_STRUCTURE_CHARACTERS} characters, not {len(text)}")
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise FieldError(field, f"{field}: not a JSON schema, at {error.json_path}: {quote(error.message)}") from error
    except RecursionError as error:
        raise FieldError(field, f"{field}: the schema is nested too deeply") from error
    return text


def _read_schema(field: str, value: str | dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise FieldError(field, f"{field}: not JSON: {error}") from error
    except RecursionError as error:
        raise FieldError(field, f"{field}: the JSON is nested too deeply") from error


def _check_regex(field: str, value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise FieldError(field, f"{field}: not a regular expression: {error}, in {quote(value)}") from error
    return value
