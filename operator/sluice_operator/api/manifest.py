"""Reads a manifest, and says in words what is wrong with it: field, value, limit, what to do."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from sluice_operator.api.serving_cluster import KIND, ServingCluster

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestProblem:
    """One thing that is wrong.

    Args:
        field: Dotted path in the manifest's names, such as ``spec.chunkSizes.prefillHeavy``.
        message: The value, the limit and what to do.
    """

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class ManifestError(ValueError):
    """A manifest that cannot be used; ``problems`` says why."""

    def __init__(self, problems: Sequence[ManifestProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def read_manifest_text(path: Path) -> str:
    """Reads a manifest's text.

    Raises:
        ManifestError: It cannot be read, or is no text; the cause is the system's error.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is no UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ManifestError([ManifestProblem(field="", message=message)]) from error
    except OSError as error:
        raise ManifestError([ManifestProblem(field="", message=f"{path} cannot be read: {error.strerror}")]) from error


def parse_manifest(text: str) -> ServingCluster:
    """Reads one ServingCluster from YAML.

    Args:
        text: The file's text; other kinds of documents in it are skipped.

    Raises:
        ManifestError: It is not YAML, holds no ServingCluster or several, or breaks a rule.
    """
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise ManifestError([ManifestProblem(field="", message=f"not valid YAML: {error}")]) from error
    clusters = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(clusters) != 1:
        kinds = ", ".join(str(d.get("kind")) if isinstance(d, dict) else type(d).__name__ for d in documents)
        message = f"holds {len(clusters)} objects of kind {KIND}, must hold one (kinds found: {kinds or 'none'})"
        raise ManifestError([ManifestProblem(field="", message=message)])
    return check_manifest(clusters[0])


def check_manifest(content: dict[str, Any]) -> ServingCluster:
    """Checks the content of a manifest.

    Raises:
        ManifestError: It breaks a rule of the schema.
    """
    try:
        return ServingCluster.model_validate(content)
    except ValidationError as error:
        problems = [_describe(details) for details in error.errors()]
        raise ManifestError(problems) from error


def _describe(details: ErrorDetails) -> ManifestProblem:
    # Pydantic names the branch of a union in the path; people do not write it.
    location = [part for part in details["loc"] if part not in ("int", "str")]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if details["type"] == "missing":
        return ManifestProblem(field=field, message="is required; add it")
    if details["type"] == "extra_forbidden":
        return ManifestProblem(field=field, message=_describe_unknown(location))
    is_bare_off = details["input"] is False and "'Disabled'" in details.get("ctx", {}).get("expected", "")
    hint = ": YAML reads a bare Off as false, so write Disabled" if is_bare_off else ""
    return ManifestProblem(field=field, message=f"{_show(details['input'])} {_describe_limit(details)}{hint}")


def _describe_limit(details: ErrorDetails) -> str:
    if details["type"] in WORDS:
        return WORDS[details["type"]]
    for limit, words in LIMITS.items():
        if limit in details.get("ctx", {}):
            return words.format(details["ctx"][limit])
    return details["msg"]


WORDS = {
    "int_type": "is not a whole number; write one without quotes",
    "int_parsing": "is not a whole number; write one without quotes",
    "string_type": "is not text; put it in quotes",
    "bool_type": "is neither true nor false; write one of them without quotes",
    "model_type": "is not a mapping of fields; write name: value lines",
    "dict_type": "is not a mapping; write name: value lines",
    "tuple_type": "is not a list; write one item per line, each after a dash",
}
# What pydantic puts into an error's context, and how it reads.
LIMITS = {
    "expected": "is not one of {0}; use one of them",
    "ge": "is below the least allowed value, {0}; use {0} or more",
    "le": "is above the greatest allowed value, {0}; use {0} or less",
    "max_length": "is longer than the greatest allowed length, {0}; shorten it",
    "min_length": "is shorter than the least allowed length, {0}; lengthen it",
    "pattern": "does not have the required form, {0}; rewrite it",
}


def _describe_unknown(location: list[str | int]) -> str:
    known = _known_names(ServingCluster, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    return f"is not a field of {KIND}; remove it ({hint})"


def _known_names(model: type[BaseModel], path: list[str | int]) -> list[str]:
    """Names of the fields at a path, walked from ``model``."""
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    if not path:
        return sorted(names)
    inner = _model_in(names[str(path[0])].annotation)
    rest = path[2:] if len(path) > 1 and isinstance(path[1], int) else path[1:]
    return _known_names(inner, rest) if inner else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, (_model_in(part) for part in getattr(annotation, "__args__", ()))), None)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
