"""Sampling fields stand in the proto and in the OpenAI schema; everything between copies them by name."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from edge_fakes import FakePlane, write_model
from tokenizers import Tokenizer, processors

from sluice.v1 import router_pb2, sampling_pb2
from sluice.wire_fields import constraint_names, optional_numbers, read_sampling
from sluice_core.records import RequestId
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.grpc import grpc_fields
from sluice_router.api.length_limits import check_num_characters, check_prompt_size, limit_output
from sluice_router.api.objectives import RequestObjectives
from sluice_router.api.openai_requests import (
    MAX_STRUCTURE_CHARACTERS,
    VLLM_DEFAULTS,
    ChatBody,
    CompletionBody,
    FieldError,
    SamplingFields,
    StructuredOutputs,
    check,
)
from sluice_router.api.request_building import Caller, NewRequestBuilder
from sluice_router.api.request_preparation import RequestPreparer
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.api.structured_output import check_constraint, find_constraint
from sluice_router.errors import ModelNotFoundError
from sluice_router.scheduling.requests import ServedModel
from sluice_router.text.chat_template import ChatTemplate
from sluice_router.text.tokenizer import GenerationDefaults, ModelText

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import FieldDescriptor

    from sluice_router.scheduling.requests import NewRequest

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


async def prepare_request(body: CompletionBody | ChatBody, text) -> NewRequest:
    preparer = RequestPreparer(FakePlane(), text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    prepare = preparer.prepare_chat if isinstance(body, ChatBody) else preparer.prepare_completion
    caller = Caller(
        arrival_s=0.0, objectives=RequestObjectives(), request_id=RequestId("req-1"), default_output_tokens=16
    )
    return (await prepare(body, caller))[0].request


async def prepare(body: CompletionBody, text) -> sampling_pb2.SamplingParams:
    return (await prepare_request(body, text)).sampling


@pytest.fixture
def text_with_bos(tmp_path: Path) -> Iterator[ModelText]:
    """Of a model whose tokenizer adds BOS, and that says how long outputs are."""
    write_model(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(path))
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 33}')
    model = ModelText.load(tmp_path)
    yield model
    model.close()


@pytest.mark.parametrize(
    ("kind", "fields", "has_bos"),
    [
        (CompletionBody, {"prompt": "x"}, True),
        (CompletionBody, {"prompt": "x", "add_special_tokens": True}, True),
        (CompletionBody, {"prompt": "x", "add_special_tokens": False}, False),
        (ChatBody, {}, False),
        (ChatBody, {"add_special_tokens": True}, True),
        (ChatBody, {"add_special_tokens": False}, False),
    ],
)
async def test_special_tokens_are_added_to_completions_and_templates_write_them(text_with_bos, kind, fields, has_bos):
    body = check(kind, {"messages": [{"role": "user", "content": "x"}], **fields})
    request = await prepare_request(body, text_with_bos)
    assert (request.prompt_token_ids[0] == 0) is has_bos


@pytest.mark.parametrize(("asked", "has_bos"), [(None, True), (True, True), (False, False)])
async def test_a_grpc_call_says_whether_special_tokens_are_added(text_with_bos, asked, has_bos):
    fields = grpc_fields.read_fields(router_pb2.GenerateRequest(add_special_tokens=asked))
    request = await prepare_request(check(CompletionBody, {**fields, "prompt": "x"}), text_with_bos)
    assert (request.prompt_token_ids[0] == 0) is has_bos


@pytest.mark.parametrize(("prompt", "number"), [("x", 1), ([5, 6], 0), (["x", "y"], 2)])
async def test_the_time_of_each_text_that_is_tokenized_is_measured(text, prompt, number):
    metrics = EdgeMetrics(SlowReaders(SlowReaderLimits()))
    caller = Caller(arrival_s=0.0, objectives=RequestObjectives(), request_id=RequestId("req-1"))
    preparer = RequestPreparer(FakePlane(), text, metrics)
    await preparer.prepare_completion(check(CompletionBody, {"prompt": prompt}), caller)
    assert sum(metrics.tokenize_s.counts) == number
    assert bool(metrics.tokenize_s.total) is bool(number)


@pytest.mark.parametrize(("asked", "max_tokens"), [(None, 33), (40, 40)])
async def test_model_says_how_long_outputs_are_unless_the_client_does(text_with_bos, asked, max_tokens):
    body = check(CompletionBody, {"prompt": "x", "max_tokens": asked})
    assert (await prepare(body, text_with_bos)).max_tokens == max_tokens


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


@pytest.mark.parametrize("excess", [0, 1])
def test_a_schema_may_be_as_long_as_the_limit_and_no_longer(excess):
    constraint = "guided_json", "json", {"title": "a" * (MAX_STRUCTURE_CHARACTERS - len('{"title": ""}') + excess)}
    if not excess:
        assert len(check_constraint(constraint).json_schema) == MAX_STRUCTURE_CHARACTERS
        return
    with pytest.raises(FieldError, match="guided_json: at most 65536 characters, not 65537") as caught:
        check_constraint(constraint)
    assert caught.value.field == "guided_json"


@pytest.mark.parametrize(
    ("given", "shown"), [('{"a": 1}', "{'a': 1}"), ({"a": 1}, "{'a': 1}"), ("", "{}"), ("no JSON", "no JSON")]
)
async def test_templates_get_arguments_of_calls_as_objects_where_they_are(tmp_path, given, shown):
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].tool_calls[0].function.arguments }}")
    model = ModelText.load(tmp_path)
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    request = await prepare_request(check(ChatBody, {"messages": [message]}), model)
    model.close()
    assert "".join(model.decode_token(token_id)[0] for token_id in request.prompt_token_ids) == shown


@pytest.mark.parametrize(
    ("models", "asked", "top_k"), [(-1, None, 0), (20, None, 20), (20, -1, 0), (20, 0, 0), (-1, 5, 5)]
)
def test_engines_are_told_of_no_limit_of_candidates_by_zero(models, asked, top_k):
    builder = NewRequestBuilder(GenerationDefaults(sampling={"top_k": models}, vocabulary_tokens=10))
    fields = {"prompt": [1]} | ({} if asked is None else {"top_k": asked})
    caller = Caller(arrival_s=0.0, objectives=RequestObjectives(), request_id=RequestId("req-1"))
    body = check(CompletionBody, fields)
    prepared = builder.build(body, "prompt", array("I", [1]), caller, max_model_len_tokens=99, owner_limit_tokens=None)
    assert prepared.request.sampling.top_k == top_k


@pytest.mark.parametrize(
    ("ignore_eos", "given", "stops"),
    [(False, [], [0, 2]), (True, [], []), (False, [7], [0, 2, 7]), (True, [7], [7]), (False, [2], [0, 2])],
)
def test_an_output_ends_with_the_models_ends_unless_they_are_ignored(ignore_eos, given, stops):
    builder = NewRequestBuilder(GenerationDefaults(eos_token_ids=frozenset({2, 0}), vocabulary_tokens=10))
    caller = Caller(arrival_s=0.0, objectives=RequestObjectives(), request_id=RequestId("req-1"))
    body = check(CompletionBody, {"prompt": [1], "ignore_eos": ignore_eos, "stop_token_ids": given})
    prepared = builder.build(body, "prompt", array("I", [1]), caller, max_model_len_tokens=99, owner_limit_tokens=None)
    assert list(prepared.request.sampling.stop_token_ids) == stops
    assert prepared.output.hidden_token_ids == set(stops)


@pytest.mark.parametrize("excess", [0, 1])
def test_a_chat_may_have_4096_messages_and_no_more(excess):
    fields = {"messages": [{}] * (4096 + excess)}
    if not excess:
        check_prompt_size(fields, None)
        return
    with pytest.raises(FieldError, match="messages: at most 4096 messages, not 4097"):
        check_prompt_size(fields, None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]}, "messages"),
        ({"messages": [{"role": "user", "tool_calls": [[]] * 40_000}]}, "messages"),
        ({"messages": [], "tools": [{}] * 40_000}, "tools"),
        ({"prompt": "a", "logit_bias": {str(number): 1 for number in range(40_000)}}, "logit_bias"),
        ({"prompt": "a", "tools": [1] * 20_000, "documents": [1] * 20_000}, ""),
        ({"prompt": "a", **{str(number): 1 for number in range(40_000)}}, ""),
    ],
    ids=["parts", "calls", "tools", "bias", "both", "fields"],
)
def test_a_body_with_so_many_values_that_they_hold_up_others_is_refused(fields, field):
    with pytest.raises(FieldError, match="at most 32768 values") as caught:
        check_prompt_size(fields, 10**6)
    assert caught.value.field == field
    assert str(caught.value).startswith(field or "the body")


@pytest.mark.parametrize("excess", [0, 1])
def test_a_body_may_have_32768_values_beside_its_prompt(excess):
    fields = {"prompt": [5] * 40_000, "tools": [1] * (32_766 + excess)}
    if not excess:
        check_prompt_size(fields, 10**6)
        return
    with pytest.raises(FieldError, match="not 32769 or more"):
        check_prompt_size(fields, 10**6)


def test_a_template_is_told_of_no_tools_and_documents_where_there_are_none():
    template = ChatTemplate({"default": "{{ tools is none }} {{ documents is none }}"}, {})
    assert template.render([], tools=[]) == template.render([]) == "True True"


@pytest.mark.parametrize("served", ["tiny", ""])
@pytest.mark.parametrize("asked", ["tiny", "other", "", None])
async def test_another_model_than_the_one_that_is_served_is_refused(text, served, asked):
    plane = FakePlane()
    plane.model = ServedModel(name=served, max_model_len_tokens=512, created_s=0)
    preparer = RequestPreparer(plane, text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    if not (served and asked == "other"):
        preparer.check_model(asked)
        return
    with pytest.raises(ModelNotFoundError, match="model 'other' does not exist; this router serves 'tiny'") as caught:
        preparer.check_model(asked)
    assert caught.value.param == "model"


@pytest.mark.parametrize(("owner", "max_tokens"), [("alice", 5), ("bob", 16), ("", 16)])
async def test_an_output_is_no_longer_than_its_owner_may_ask_for(text, owner, max_tokens):
    plane = FakePlane()
    plane.output_limits = {"alice": 5}
    preparer = RequestPreparer(plane, text, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    caller = Caller(
        arrival_s=0.0,
        objectives=RequestObjectives(),
        request_id=RequestId("req-1"),
        default_output_tokens=16,
        owner=owner,
    )
    [prepared] = await preparer.prepare_completion(check(CompletionBody, {"prompt": "x"}), caller)
    assert prepared.request.sampling.max_tokens == max_tokens


def test_the_first_token_id_beyond_the_vocabulary_is_named():
    builder = NewRequestBuilder(GenerationDefaults(vocabulary_tokens=10))
    builder.check_token_ids("prompt", [0, 9])
    with pytest.raises(FieldError, match=r"prompt\[1\]: token ids are below 10, not 10"):
        builder.check_token_ids("prompt", [9, 10, 12, 11])


@pytest.mark.parametrize("number", [0, 1])
def test_alternatives_need_logprobs_even_where_there_are_none(number):
    chat = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": number}
    assert check(ChatBody, {**chat, "logprobs": True}).num_logprobs == number
    for logprobs in ({}, {"logprobs": False}):
        with pytest.raises(FieldError, match="top_logprobs is only allowed when logprobs is true"):
            check(ChatBody, {**chat, **logprobs})


@pytest.mark.parametrize(
    ("asked", "default", "owner_limit", "room", "max_tokens"),
    [
        (None, 16, None, 400, 16),
        (None, 16, 99, 400, 16),
        (None, 16, 5, 400, 5),
        (None, None, 99, 400, 99),
        (None, None, 500, 400, 400),
        (None, None, None, 400, 400),
        (7, 16, 7, 400, 7),
        (20, 16, None, 400, 20),
        (None, None, None, None, 16),
        (None, 33, None, None, 33),
        (None, 33, 9, None, 9),
        (99, 33, None, None, 99),
    ],
)
def test_an_output_is_as_long_as_client_model_and_owner_let_it_be(asked, default, owner_limit, room, max_tokens):
    length = limit_output(
        check(CompletionBody, {"prompt": "x", "max_tokens": asked}),
        "prompt",
        [1] * 100,
        default_tokens=default,
        owner="alice",
        owner_limit_tokens=owner_limit,
        max_model_len_tokens=None if room is None else 100 + room,
    )
    assert length == max_tokens


def test_the_reason_of_a_refused_grammar_is_one_line_of_200_characters():
    grammar = f"start: {'n' * 300}\nn: /a/\n"
    with pytest.raises(FieldError, match="guided_grammar: cannot be compiled: ") as caught:
        check_constraint(("guided_grammar", "grammar", grammar))
    reason = str(caught.value).partition("cannot be compiled: ")[2].rpartition(", in ")[0]
    assert len(reason) == 200
    assert "\n" not in reason


@pytest.mark.parametrize("excess", [0, 1])
def test_a_prompt_may_have_as_many_characters_as_can_fit_and_no_more(excess):
    if not excess:
        check_num_characters("prompt", "a" * 60, 10, 6)
        check_num_characters("prompt", "a" * 999, None, 6)
        return
    with pytest.raises(FieldError, match="61 characters of prompt, and no more than 60 can fit"):
        check_num_characters("prompt", "a" * 61, 10, 6)


def test_document_names_every_field():
    text = API_PAGE.read_text()
    wanted = {name for field in FIELDS for name in HTTP_NAMES.get(field.name, (field.name,))}
    assert not [name for name in sorted(wanted) if f"`{name}`" not in text]
