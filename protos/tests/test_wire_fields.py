"""Enum values and sampling fields, read from the descriptors."""

from __future__ import annotations

import pytest

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice.wire_fields import constraint_names, names_by_value, optional_numbers, read_constraint, read_sampling


def test_names_lack_the_enums_prefix_and_the_unspecified_value():
    assert names_by_value(plan_pb2.Role) == {
        plan_pb2.ROLE_PREFILL_HEAVY: "PREFILL_HEAVY",
        plan_pb2.ROLE_DECODE_HEAVY: "DECODE_HEAVY",
    }
    assert names_by_value(engine_pb2.MoveCause)[engine_pb2.MOVE_CAUSE_PREFILL_DONE] == "PREFILL_DONE"


def test_absent_optional_fields_are_left_out_and_zero_is_a_value():
    values = read_sampling(sampling_pb2.SamplingParams(max_tokens=3, seed=0, logit_bias={5: 0.5}, stop_token_ids=[7]))
    assert values == {
        "max_tokens": 3,
        "min_tokens": 0,
        "seed": 0,
        "stop_token_ids": [7],
        "ignore_eos": False,
        "logit_bias": {5: 0.5},
        "bad_words": [],
    }


def test_optional_numbers_are_neither_flags_nor_lists():
    assert {"temperature", "seed", "num_logprobs"} <= optional_numbers()
    assert optional_numbers().isdisjoint({"max_tokens", "ignore_eos", "stop_token_ids", "structured_output"})


@pytest.mark.parametrize(
    ("message", "constraint"),
    [
        (sampling_pb2.StructuredOutput(), None),
        (sampling_pb2.StructuredOutput(json_schema="{}"), ("json", "{}")),
        (sampling_pb2.StructuredOutput(choices={"values": ["a", "b"]}), ("choice", ["a", "b"])),
        (sampling_pb2.StructuredOutput(json_object=False), ("json_object", False)),
    ],
    ids=["none", "schema", "choices", "object"],
)
def test_constraint_has_vllms_name(message, constraint):
    assert read_constraint(message) == constraint
    assert constraint is None or constraint[0] in constraint_names()
