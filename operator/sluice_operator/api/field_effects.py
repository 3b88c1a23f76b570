"""What a change of a manifest field can do, and the walker over fields; ``spec`` says what each field's does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo


class FieldEffect(StrEnum):
    """What a change of a field does to a running cluster; each field carries one, or inherits it."""

    LIVE = "live"
    RESTARTS_ENGINES = "restarts engines"
    RESTARTS_ROUTERS = "restarts routers"
    RESTARTS_ALL = "restarts engines and routers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafField:
    """A field that holds no further fields.

    Args:
        path: Dotted path in the manifest's names.
        name: Its name in the model.
        field: Its declaration.
        effect: What a change of it does.
        owners: The models that hold it, one of each spec that is walked.
    """

    path: str
    name: str
    field: FieldInfo
    effect: FieldEffect
    owners: tuple[BaseModel, ...]

    @property
    def values(self) -> list[Any]:
        """Its value in each spec."""
        return [getattr(owner, self.name) for owner in self.owners]


def walk_fields(*models: BaseModel, path: str, inherited: FieldEffect = FieldEffect.LIVE) -> Iterator[LeafField]:
    """Walks the fields of one spec, or of several side by side.

    Args:
        *models: Models of one type.
        path: Where they are.
        inherited: Effect of fields that carry none themselves.
    """
    for name, field in type(models[0]).model_fields.items():
        effect = next((mark for mark in field.metadata if isinstance(mark, FieldEffect)), inherited)
        inner = f"{path}.{field.alias or name}"
        values = [getattr(model, name) for model in models]
        # A part that is absent on one side is compared as a whole.
        if isinstance(values[0], BaseModel) and len({type(value) for value in values}) == 1:
            yield from walk_fields(*values, path=inner, inherited=effect)
        else:
            yield LeafField(path=inner, name=name, field=field, effect=effect, owners=models)
