"""What the fields of the manifest are made of: the base model, and checked scalars as the CRD declares them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


class ManifestModel(BaseModel):
    """A part of the manifest: camelCase names, unknown fields refused, immutable, described by its docstrings."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_as_the_api_server(cls, data: Any) -> Any:
        """Takes a field without a value as absent, and 2.0 as 2."""
        if not isinstance(data, dict):
            return data
        known = {name for key, field in cls.model_fields.items() for name in (key, field.alias)}
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in data.items()
            if value is not None or name not in known
        }


# What the CRD says of the checked scalars below.
COUNT_OR_PERCENTAGE = r"^(0|[1-9][0-9]{0,2}|10[01][0-9]|102[0-4]|[1-9]?[0-9]%|100%)$"
QUANTITY = r"^[0-9]+([.][0-9]+)?([numkMGTPE]|[KMGTPE]i|[eE][0-9]{1,2})?$"
PORT_RANGE = r"^[1-9][0-9]{3,4}-[1-9][0-9]{3,4}$"
PARENT_DIRECTORY = r"(^|/)[.][.](/|$)"
OPTIONAL_RESOURCE_NAME = r"^(([a-z0-9.-]+/)?[A-Za-z0-9._-]+)?$"
MAX_ENGINES = 1024


def _refuse_other_types(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("int_or_string", "must be a whole number or text")
    return value


def _check_count_or_percentage(value: int | str) -> int | str:
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("int_or_string", 'must not be negative; use 0 or more, or a percentage ("50%")')
    if isinstance(value, int) and value > MAX_ENGINES:
        raise PydanticCustomError("int_or_string", f"is above the greatest number of engines, {MAX_ENGINES}; lower it")
    if isinstance(value, str) and not re.fullmatch(COUNT_OR_PERCENTAGE, value):
        raise PydanticCustomError("int_or_string", 'must be a whole number or "0%" to "100%"')
    return int(value) if isinstance(value, str) and not value.endswith("%") else value


def _check_quantity(value: int | str) -> int | str:
    if value < 0 if isinstance(value, int) else not re.fullmatch(QUANTITY, value):
        raise PydanticCustomError("quantity", "must be a Kubernetes quantity, 0 or more, such as 2, 500m or 16Gi")
    return value


def _check_port_range(value: str) -> str:
    low, _, high = value.partition("-")
    if not re.fullmatch(PORT_RANGE, value) or not 1024 <= int(low) <= int(high) <= 65535:
        raise PydanticCustomError(
            "port_range", 'must be two ports from 1024 to 65535, low to high, such as "7000-7099"'
        )
    return value


def _check_path(value: str) -> str:
    if re.search(PARENT_DIRECTORY, value):
        raise PydanticCustomError("path", "must stay inside its volume; remove the parts that are ..")
    return value


# Kubernetes' IntOrString: a count of engines, or a share of the replicas.
CountOrPercentage = Annotated[
    int | str,
    BeforeValidator(_refuse_other_types),
    AfterValidator(_check_count_or_percentage),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": MAX_ENGINES,
            "maxLength": 4,
            "pattern": COUNT_OR_PERCENTAGE,
        }
    ),
]
Percentage = Annotated[str, Field(pattern=r"^([1-9][0-9]?|100)%$", max_length=4)]
ErrorRate = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]?|100)%$", max_length=4)]
PortRange = Annotated[
    str,
    AfterValidator(_check_port_range),
    WithJsonSchema({"type": "string", "maxLength": 11, "pattern": PORT_RANGE}),
]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
# A DNS label, and a DNS name: what Kubernetes allows in names of most things.
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
HostName = Annotated[str, Field(pattern=r"^([*][.])?[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
ResourceName = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9._-]+$", max_length=253)]
Quantity = Annotated[
    int | str,
    BeforeValidator(_refuse_other_types),
    AfterValidator(_check_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "minimum": 0, "maxLength": 32, "pattern": QUANTITY}),
]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@ ]+(/[^?# ]*)?$", max_length=1024)]
# Without characters that shells, Kubernetes' variables or paths of volumes would read otherwise.
ObjectStorageUri = Annotated[
    str, Field(pattern=r"^(s3|gs)://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*/?$", max_length=1024)
]
# Values of labels, selectors and annotations.
ShortText = Annotated[str, Field(max_length=1024)]
RelativePath = Annotated[str, Field(max_length=1024, pattern=r"^[^/]"), AfterValidator(_check_path)]
# For modes: YAML reads a bare Off as false, so manifests say Disabled. Programs and routers know it as Off.
DISABLED_IS_OFF = (
    AfterValidator(lambda mode: "Off" if mode == "Disabled" else mode),
    Field(json_schema_extra={"default": "Disabled"}),
)
StrictBool = Annotated[bool, Field(strict=True)]
StringMap = Annotated[dict[str, ShortText], Field(max_length=64)]


def percent(text: str) -> int:
    """Reads a checked percentage such as ``"90%"``."""
    return int(text.removesuffix("%"))


def port_range(text: str) -> range:
    """Reads a checked port range such as ``"7000-7099"``, both ends included."""
    low, high = text.split("-")
    return range(int(low), int(high) + 1)


class KeyRef(ManifestModel):
    """A key of a Secret or a ConfigMap in the cluster's namespace."""

    name: ObjectName
    """Name of the object."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
    """Key in it."""
