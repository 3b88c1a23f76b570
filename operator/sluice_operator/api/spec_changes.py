"""What an edit of a manifest changes, and what that does to a running cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sluice_operator.api.field_effects import FieldEffect, walk_fields

if TYPE_CHECKING:
    from sluice_operator.api.fields_and_defaults.cluster_spec import SpecFields


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """A field that differs.

    Args:
        field: Dotted path in the manifest's names.
        old: Value before.
        new: Value after.
        effect: What the change does.
    """

    field: str
    old: Any
    new: Any
    effect: FieldEffect

    def __str__(self) -> str:
        return f"{self.field} {_show(self.old)} -> {_show(self.new)}"


def diff_specs(old: SpecFields, new: SpecFields) -> list[FieldChange]:
    """Lists the fields that differ between two specs, each with its effect."""
    changes = []
    for leaf in walk_fields(old, new, path="spec"):
        before, after = leaf.values
        if before != after:
            changes.append(FieldChange(field=leaf.path, old=before, new=after, effect=leaf.effect))
    return changes


def _show(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
