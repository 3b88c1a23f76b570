"""Enum values and sampling fields read from the protos' descriptors, so that no list repeats them by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sluice.v1 import sampling_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

Value = TypeVar("Value", bound=int)


class WireEnum(Protocol[Value]):
    """An enum of a generated module."""

    @property
    def DESCRIPTOR(self) -> EnumDescriptor:  # noqa: N802 - protobuf's name
        """Describes it."""
        ...

    def items(self) -> list[tuple[str, Value]]:
        """Names and values."""
        ...


# Constraints whose name in vLLM, and so in HTTP bodies, is not the proto's.
_VLLM_CONSTRAINTS = {"json_schema": "json", "choices": "choice"}


def names_by_value(enum: WireEnum[Value]) -> dict[Value, str]:
    """Names of an enum's values, without the enum's own prefix and without the unspecified value.

    ``ROLE_PREFILL_HEAVY`` of ``Role`` is ``PREFILL_HEAVY``, as the member of the core's enum is called.
    """
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.DESCRIPTOR.name).upper() + "_"
    return {value: name.removeprefix(prefix) for name, value in enum.items() if value}


def optional_numbers() -> frozenset[str]:
    """Names of the sampling fields whose absence means the model's default, or vLLM's."""
    return frozenset(
        field.name
        for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
        if field.has_presence and field.message_type is None
    )


def read_sampling(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """Reads sampling parameters into plain values by field name.

    Optional fields that are absent are left out. So is the constraint; see ``read_constraint``.
    """
    present = {field.name for field, _ in message.ListFields()}
    return {
        field.name: _read_value(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name != "structured_output" and (field.name in present or not field.has_presence)
    }


def read_constraint(message: sampling_pb2.StructuredOutput) -> tuple[str, Any] | None:
    """Reads a constraint on the output.

    Returns:
        vLLM's name of its kind, and its value; None where nothing is constrained.
    """
    kind = message.WhichOneof("constraint")
    if kind is None:
        return None
    value = list(message.choices.values) if kind == "choices" else getattr(message, kind)
    return _VLLM_CONSTRAINTS.get(kind, kind), value


def constraint_names() -> dict[str, str]:
    """The proto's names of constraints by vLLM's."""
    fields = sampling_pb2.StructuredOutput.DESCRIPTOR.oneofs_by_name["constraint"].fields
    return {_VLLM_CONSTRAINTS.get(field.name, field.name): field.name for field in fields}


def _read_value(message: sampling_pb2.SamplingParams, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    return list(value) if field.is_repeated else value
