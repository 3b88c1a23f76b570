"""Sampling fields stand in the proto and in the OpenAI schema; everything between copies them by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from edge_fakes import FakePlane

from sluice.v1 import router_pb2, sampling_pb2
from sluice.wire_fields import constraint_names, optional_numbers, read_sampling
from sluice_core.records import RequestId
from sluice_router.api import grpc_fields
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.objectives import RequestObjectives
from sluice_router.api.openai_requests import (
    VLLM_DEFAULTS,
    CompletionBody,
    SamplingFields,
    StructuredOutputs,
    check,
)
from sluice_router.api.request_preparation import Caller, RequestPreparer
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.api.structured_output import check_constraint, find_constraint

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor

(API_PAGE,) = (Path(__file__).parents[2] / "docs").rglob("api.md")
FIELDS = sampling_pb2.SamplingParams.DESCRIPTOR.fields
# Where a field of the proto is another one, or two, for HTTP clients.
HTTP_NAMES = {"num_logprobs": ("logprobs", "top_logprobs"), "structured_output": ("structured_outputs",)}
# The proto's names of fields that go by name from the body to the engine.
COPIED = [field for field in FIELDS if field.name not in HTTP_NAMES]
CONSTRAINTS = {
    "json": '{"type": "object"}',
    "regex": "[0-9]+",
    "grammar": 'root ::= "a"',
    "choice": ["a", "b"],
    "json_object": True,
}


def sample(field: FieldDescriptor) -> object:
    """A value that is nobody's default."""
    if field.name == "logit_bias":
        return {"3": 0.5}
    if field.cpp_type == field.CPPTYPE_FLOAT:
        return 0.5
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    value: object = "word" if field.cpp_type == field.CPPTYPE_STRING else 5
    return [value] if field.is_repeated else value


async def prepare(body: CompletionBody, text) -> sampling_pb2.SamplingParams:
    preparer = RequestPreparer(FakePlane(), text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    prepared = await preparer.prepare_completion(
        body, Caller(arrival_s=0.0, objectives=RequestObjectives(), request_id=RequestId("req-1"))
    )
    return prepared[0].request.sampling


def test_every_field_of_the_proto_is_one_of_the_openai_schema():
    wanted = {name for field in FIELDS for name in HTTP_NAMES.get(field.name, (field.name,))}
    assert wanted - {"logprobs", "top_logprobs"} <= SamplingFields.model_fields.keys()


def test_every_optional_number_has_vllms_default():
    assert VLLM_DEFAULTS.keys() == optional_numbers() - {"seed", "num_logprobs"}


@pytest.mark.parametrize("field", COPIED, ids=lambda field: field.name)
async def test_field_of_an_http_body_arrives(field, text):
    value = sample(field)
    body = check(CompletionBody, {"prompt": "x", "max_tokens": 9, "ignore_eos": True, field.name: value})
    arrived = read_sampling(await prepare(body, text))[field.name]
    assert arrived == ({3: 0.5} if field.name == "logit_bias" else value)


@pytest.mark.parametrize("field", COPIED, ids=lambda field: field.name)
async def test_field_of_a_grpc_call_arrives(field, text):
    value = {3: 0.5} if field.name == "logit_bias" else sample(field)
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 9, "ignore_eos": True, field.name: value})
    request = router_pb2.GenerateRequest(text="x", sampling=sampling)
    body = check(CompletionBody, {**grpc_fields.read_fields(request), "prompt": "x"})
    assert read_sampling(await prepare(body, text))[field.name] == value


def test_every_constraint_of_the_proto_is_one_of_the_openai_schema():
    names = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert names == constraint_names().keys() == CONSTRAINTS.keys()


@pytest.mark.parametrize(("kind", "value"), CONSTRAINTS.items())
def test_constraint_of_an_http_body_arrives_and_is_the_grpc_calls_own(kind, value):
    body = check(CompletionBody, {"prompt": "x", "structured_outputs": {kind: value}})
    constraint = find_constraint(body)
    assert constraint is not None
    message = check_constraint(constraint)
    assert message.WhichOneof("constraint") == constraint_names()[kind]
    sampling = sampling_pb2.SamplingParams(structured_output=message)
    fields = grpc_fields.read_fields(router_pb2.GenerateRequest(text="x", sampling=sampling))
    assert fields["structured_outputs"] == {kind: value}


def test_document_names_every_field():
    text = API_PAGE.read_text()
    wanted = {name for field in FIELDS for name in HTTP_NAMES.get(field.name, (field.name,))}
    assert not [name for name in sorted(wanted) if f"`{name}`" not in text]
