"""Constraints on the output: OpenAI's and vLLM's ways to say them, one wire form."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from sluice.v1 import sampling_pb2
from sluice.wire_fields import constraint_names
from sluice_router.api.openai_requests import MAX_STRUCTURE_CHARACTERS, FieldError, SamplingFields, quote
from sluice_router.text.grammar_check import GrammarError, check_expansion
from sluice_router.text.grammar_process import check_grammar_apart

# Of the library's reason for a refusal.
MAX_REASON_CHARACTERS = 200
Constraint = tuple[str, str, Any]
_WIRE_NAMES = constraint_names()


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
        value = _check_schema(field, value)
    elif kind == "choice" and not all(value):
        raise FieldError(field, f"{field}: a choice is empty")
    try:
        check_grammar_apart(kind, value)
    except GrammarError as error:
        raise FieldError(field, f"{field}: cannot be compiled: {_shorten(error)}, in {quote(value)}") from error
    if kind == "choice":
        value = sampling_pb2.StructuredOutput.Choices(values=value)
    return sampling_pb2.StructuredOutput(**{_WIRE_NAMES[kind]: value})


def _from_response_format(body: SamplingFields) -> list[Constraint]:
    wanted = body.response_format
    if wanted is None:
        return []
    if wanted.type != "json_schema" and wanted.json_schema is not None and wanted.json_schema.json_schema is not None:
        field = "response_format.json_schema"
        raise FieldError(field, f"{field}: only with type json_schema, not {wanted.type}")
    if wanted.type == "text":
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
    names = {name: field.alias or name for name, field in type(wanted).model_fields.items()}
    given = {kind: getattr(wanted, name) for name, kind in names.items()}
    # ``json_object: false`` constrains nothing; an empty schema does, it allows any JSON.
    constraints = {kind: value for kind, value in given.items() if value is not None and value is not False}
    return [(f"structured_outputs.{kind}", kind, value) for kind, value in constraints.items()]


def _check_schema(field: str, value: str | dict[str, Any]) -> str:
    schema = _read_schema(field, value)
    if not isinstance(schema, dict):
        raise FieldError(field, f"{field}: a JSON schema is an object, not {quote(schema)}")
    try:
        # It may be nested as deeply as the reader still follows, and the writer does not.
        text = json.dumps(schema)
        if len(text) > MAX_STRUCTURE_CHARACTERS:
            raise FieldError(field, f"{field}: at most {MAX_STRUCTURE_CHARACTERS} characters, not {len(text)}")
        check_expansion(schema)
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise FieldError(field, f"{field}: not a JSON schema, at {error.json_path}: {quote(error.message)}") from error
    except GrammarError as error:
        raise FieldError(field, f"{field}: {error}") from error
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


def _shorten(error: GrammarError) -> str:
    """Returns a reason on one line; the library shows the whole grammar in further ones."""
    return " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
