"""What the fields of the manifest are made of: the base record, checked scalars, and what a change of a field does."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


class Effect(StrEnum):
    """What a change of a field does to a running cluster; each field carries one, or inherits it."""

    LIVE = "live"
    RESTARTS_ENGINES = "restarts engines"
    RESTARTS_ROUTERS = "restarts routers"
    RESTARTS_ALL = "restarts engines and routers"


class Part(BaseModel):
    """A part of the manifest: camelCase names, unknown fields refused, immutable, described by its docstrings."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


def _refuse_number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("int_or_string", 'must be a whole number or a percentage such as "50%"')
    return value


def _check_count_or_percentage(value: int | str) -> int | str:
    if isinstance(value, int):
        if value < 0:
            raise PydanticCustomError("int_or_string", 'must not be negative; use 0 or more, or a percentage ("50%")')
        return value
    if not re.fullmatch(r"[0-9]{1,4}|([0-9]{1,2}|100)%", value):
        raise PydanticCustomError("int_or_string", 'must be a whole number or "0%" to "100%"')
    return value if value.endswith("%") else int(value)


def _check_port_range(value: str) -> str:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", value)
    if not match or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        raise PydanticCustomError(
            "port_range", 'must be two ports from 1024 to 65535, low to high, such as "7000-7099"'
        )
    return value


# Kubernetes' IntOrString: a count of engines, or a share of the replicas.
CountOrPercentage = Annotated[int | str, BeforeValidator(_refuse_number), AfterValidator(_check_count_or_percentage)]
Percentage = Annotated[str, Field(pattern=r"^([1-9][0-9]?|100)%$")]
PortRange = Annotated[str, AfterValidator(_check_port_range)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
# A DNS label: what Kubernetes allows in names of most things.
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
ResourceName = Annotated[str, Field(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9._-]+$", max_length=253)]
Quantity = Annotated[int | str, Field(union_mode="left_to_right")]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
StrictBool = Annotated[bool, Field(strict=True)]


def percent(text: str) -> int:
    """Reads a checked percentage such as ``"90%"``."""
    return int(text.removesuffix("%"))


def port_range(text: str) -> range:
    """Reads a checked port range such as ``"7000-7099"``, both ends included."""
    low, high = text.split("-")
    return range(int(low), int(high) + 1)
