"""The committed Python of the protos is what the protos say, and the protos keep to their own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, FileDescriptor

from sluice.v1 import control_pb2, engine_pb2, plan_pb2, resume_pb2, router_pb2, sampling_pb2

PROTOS = Path(__file__).parents[1]
FILES: list[FileDescriptor] = [
    m.DESCRIPTOR for m in (control_pb2, engine_pb2, plan_pb2, resume_pb2, router_pb2, sampling_pb2)
]
GENERATED = sorted(p.relative_to(PROTOS) for p in PROTOS.glob("sluice/v1/*_pb2*.py*"))
ENUMS: list[EnumDescriptor] = [enum for file in FILES for enum in file.enum_types_by_name.values()]

# Units that a quantity's name must end with, by the word that gives the quantity away.
UNIT_SUFFIXES = ("_s", "_tokens", "_bytes", "_milliseconds", "_ms", "_percent", "_ratio", "_per_s", "_per_token")


def test_generated_python_is_what_the_protos_say(tmp_path: Path) -> None:
    subprocess.run(
        [str(PROTOS / "generate.sh"), str(tmp_path)],
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    drifted = [str(p) for p in GENERATED if (PROTOS / p).read_bytes() != (tmp_path / p).read_bytes()]
    assert not drifted, f"run protos/generate.sh: {drifted}"
    assert {p.relative_to(tmp_path) for p in tmp_path.glob("sluice/v1/*_pb2*.py*")} == set(GENERATED)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda e: e.name)
def test_every_enum_starts_with_unspecified(enum: EnumDescriptor) -> None:
    zero = enum.values_by_number[0]
    assert zero.name.endswith("_UNSPECIFIED")


def _float_fields() -> list[FieldDescriptor]:
    messages = [message for file in FILES for message in file.message_types_by_name.values()]
    return [
        field
        for message in messages
        for field in message.fields
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
    ]


# Pure numbers, probabilities and vLLM's own parameter names carry no unit.
UNITLESS = {"attention_work", "queued_attention_work", "late_attention_work", "logprob", "top_logprobs"} | {
    field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
}


@pytest.mark.parametrize("field", _float_fields(), ids=lambda f: f.full_name)
def test_every_fractional_quantity_names_its_unit(field: FieldDescriptor) -> None:
    if field.name not in UNITLESS:
        assert field.name.endswith(UNIT_SUFFIXES)
