"""Requests over HTTP: what is accepted and how it reaches the data plane, what is refused and how."""

from __future__ import annotations

import json
import time

import pytest
from edge_fakes import FakePlane, say
from http_requests_harness import make_chat, make_completion, serving_client

from sluice_core.records import RequestId
from sluice_router.api.objectives import read_objectives
from sluice_router.api.openai_requests import FieldError, SluiceOptions
from sluice_router.api.request_ids import check_request_id, choose_shown_id
from sluice_router.scheduling.requests import ServedModel

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
async def plane(text):
    return FakePlane(say(text, "hello world"))


@pytest.fixture
async def client(plane, text):
    async with serving_client(plane, text) as made:
        yield made


async def test_last_given_objective_wins(client, plane):
    headers = {
        "x-sluice-slo-ttft-ms": "500",
        "x-llm-d-slo-ttft-ms": "600",
        "x-llm-d-slo-tpot-ms": "70",
        "x-sluice-slo-class": "chat",
        "x-sluice-priority": "3",
    }
    await client.post("/v1/completions", json=make_completion(), headers=headers)
    body = make_completion(sluice={"slo_tpot_ms": 80, "slo_class": "batch", "priority": -2})
    await client.post("/v1/completions", json=body, headers=headers)
    await client.post("/v1/completions", json=make_completion())
    seen = [(r.ttft_slo_s, r.tpot_slo_s, r.slo_class, r.priority) for r in plane.admitted]
    assert seen == [(0.5, 0.07, "chat", 3), (0.5, 0.08, "batch", -2), (None, None, "", None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_model_that_is_served_though_nobody_asked_for_it(client, stream):
    begun_s = int(time.time())
    answer = (await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})).text
    first = json.loads(answer.removeprefix("data: ").partition("\n\n")[0])
    assert first["model"] == "tiny"
    assert begun_s <= first["created"] <= time.time()


@pytest.mark.parametrize("field", [None, "slo_ttft_ms", "slo_tpot_ms", "slo_class", "priority"])
def test_the_body_wins_over_the_headers_each_field_on_its_own(field):
    headers = {
        "x-sluice-slo-ttft-ms": "1000",
        "x-sluice-slo-tpot-ms": "2000",
        "x-sluice-slo-class": "header",
        "x-sluice-priority": "3",
    }
    given = {"slo_ttft_ms": 4000, "slo_tpot_ms": 5000, "slo_class": "", "priority": 0}
    options = None if field is None else SluiceOptions(**{field: given[field]})
    expected = {"slo_ttft_ms": 1.0, "slo_tpot_ms": 2.0, "slo_class": "header", "priority": 3}
    if field is not None:
        expected[field] = {**given, "slo_ttft_ms": 4.0, "slo_tpot_ms": 5.0}[field]
    found = read_objectives(headers, options)
    assert [found.ttft_slo_s, found.tpot_slo_s, found.slo_class, found.priority] == list(expected.values())


async def test_seed_of_minus_one_is_none(client, plane):
    await client.post("/v1/completions", json=make_completion(seed=-1))
    await client.post("/v1/completions", json=make_completion(seed=-2))
    assert [r.sampling.seed if r.sampling.HasField("seed") else None for r in plane.admitted] == [None, -2]


async def test_absent_fields_take_the_models_then_the_neutral_defaults(client, plane):
    await client.post("/v1/completions", json=make_completion())
    await client.post("/v1/chat/completions", json=make_chat(temperature=0, top_k=-1, top_p=0.5))
    first, second = (request.sampling for request in plane.admitted)
    assert first.temperature == pytest.approx(0.7)
    assert first.top_k == 20
    assert (first.top_p, first.min_p, first.repetition_penalty, first.presence_penalty) == (1, 0, 1, 0)
    assert first.max_tokens == 16
    assert list(first.stop_token_ids) == [0, 2]
    assert not first.HasField("num_logprobs")
    assert not first.HasField("structured_output")
    assert (second.temperature, second.top_k, second.top_p) == (0, 0, 0.5)
    assert second.max_tokens == 512 - len(plane.admitted[1].prompt_token_ids)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("room", "asked", "max_tokens"),
    [(1, None, 1), (16, None, 16), (5, None, 5), (5, 5, 5), (5, 4, 4)],
    ids=["one token is left", "the default is left", "less than the default", "all is asked for", "less is asked for"],
)
async def test_output_may_fill_the_models_length_exactly(client, plane, text, path, room, asked, max_tokens):
    def ask(word_count):
        prompt = " hello" * word_count
        return (
            make_completion(prompt=prompt)
            if path == "/v1/completions"
            else make_chat(messages=[{"role": "user", "content": prompt}])
        )

    await client.post(path, json=ask(1))
    one = len(plane.admitted.pop().prompt_token_ids)
    body = ask(1 + 512 - room - one) | ({} if asked is None else {"max_tokens": asked})
    assert (await client.post(path, json=body)).status_code == 200
    assert len(plane.admitted[0].prompt_token_ids) == 512 - room
    assert plane.admitted[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize(("engines_say", "length"), [(40, 40), (600, 600), (0, 512)])
async def test_engines_say_how_long_the_model_is_and_its_files_while_there_are_none(client, plane, engines_say, length):
    plane.model = ServedModel(name="tiny", max_model_len_tokens=engines_say, created_s=0)
    await client.post("/v1/chat/completions", json=make_chat())
    [request] = plane.admitted
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == length
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == length
    refused = await client.post("/v1/completions", json=make_completion(prompt=[1] * length))
    assert f"the model's limit is {length} tokens" in refused.json()["error"]["message"]


async def test_all_sampling_fields_reach_the_data_plane(client, plane):
    fields = {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": -(2**63),
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "logprobs": 0,
        "bad_words": ["no", "never"],
    }
    await client.post("/v1/completions", json=make_completion(**fields))
    sampling = plane.admitted[0].sampling
    assert dict(sampling.logit_bias) == {5: -100, 6: 1.5}
    assert (list(sampling.stop_token_ids), list(sampling.bad_words)) == ([7], ["no", "never"])
    assert sampling.HasField("num_logprobs")
    plain = fields.keys() - {"logit_bias", "stop_token_ids", "bad_words", "logprobs"}
    assert {name: getattr(sampling, name) for name in plain} == {name: fields[name] for name in plain}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["a", "b"]}, "choices", ["a", "b"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"choice": ["a"]}}, "choices", ["a"]),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "(?i)abc"}}, "regex", "(?i)abc"),
        ({"response_format": {"type": "text"}}, None, None),
        ({"structured_outputs": {"json_object": False}}, None, None),
        ({"structured_outputs": {"json_object": False, "regex": "[ab]"}}, "regex", "[ab]"),
        ({"guided_json": {}}, "json_schema", {}),
    ],
)
async def test_constraints_reach_the_data_plane(client, plane, fields, kind, value):
    response = await client.post("/v1/chat/completions", json=make_chat(**fields))
    assert response.status_code == 200, response.text
    wanted = plane.admitted[0].sampling.structured_output
    assert wanted.WhichOneof("constraint") == kind
    if kind is not None:
        found = getattr(wanted, kind)
        found = list(found.values) if kind == "choices" else found
        assert (json.loads(found) if kind == "json_schema" else found) == value


async def test_neutral_values_of_unsupported_fields_are_accepted(client, plane):
    fields = {
        "n": 1,
        "best_of": None,
        "structured_outputs": {"disable_any_whitespace": False},
        "sluice": {"x": None},
        "echo": False,
        "suffix": None,
        "logprobs": None,
        "priority": 0,
        "stop": None,
    }
    assert (await client.post("/v1/completions", json=make_completion(**fields))).status_code == 200
    assert (
        await client.post("/v1/chat/completions", json=make_chat(modalities=["text"], functions=None))
    ).status_code == 200


async def test_unknown_fields_are_ignored_and_named(client, plane):
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"user": "me", "zebra": 1, "stream_options": stream_options, "response_format": {"type": "text"}}
    response = await client.post("/v1/completions", json=make_completion(stream=True, **fields))
    assert response.status_code == 200
    ignored = response.headers["x-sluice-ignored"]
    assert ignored == "stream_options.continuous_usage_stats, user, zebra"
    assert "x-sluice-ignored" not in (await client.post("/v1/completions", json=make_completion())).headers


async def test_arguments_of_calls_that_are_nested_too_deeply_to_be_read_stay_text(client, plane):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 15_000}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    response = await client.post("/v1/chat/completions", json=make_chat(messages=messages))
    assert response.status_code == 200, response.text
    assert len(plane.admitted) == 1


async def test_hostile_names_of_unknown_fields_do_not_break_the_header(client, plane):
    response = await client.post(
        "/v1/completions", json=make_completion(**{"a\r\nx-evil: 1": 1, "é": 2, "k" * 5000: 3})
    )
    assert response.status_code == 200
    assert "x-evil" not in response.headers
    assert len(response.headers["x-sluice-ignored"]) <= 1100


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]], ids=["ids", "list-of-one"])
async def test_token_ids_are_used_as_they_are(client, plane, prompt):
    answer = await client.post("/v1/completions", json=make_completion(prompt=prompt, return_token_ids=True))
    assert list(plane.admitted[0].prompt_token_ids) == [5, 6, 7]
    choice = answer.json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["token_ids"][-1] == 2


async def test_stream_returns_every_token_id_once(client, plane, text):
    body = make_completion(prompt=[5, 6], stream=True, return_token_ids=True)
    lines = (await client.post("/v1/completions", json=body)).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if "choices" in line]
    assert [i for choice in choices for i in choice["token_ids"]] == [
        *text.encode_now("hello world", add_special_tokens=False),
        2,
    ]
    assert [choice.get("prompt_token_ids") for choice in choices][:2] == [[5, 6], None]


async def test_tools_and_parts_are_rendered(client, plane, text):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.post(
        "/v1/chat/completions", json=make_chat(messages=[{"role": "user", "content": parts}], tools=tools)
    )
    prompt = f"<|im_start|>user\none\ntwo<|im_end|>\n{json.dumps(tools)}<|im_start|>assistant\n"
    assert list(plane.admitted[0].prompt_token_ids) == text.encode_now(prompt, add_special_tokens=False)


TOOL = {"type": "function", "function": {"name": "f"}}


def _call_tool(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("fields", "rest"),
    [
        ({"tools": [TOOL], "tool_choice": "auto"}, json.dumps([TOOL]) + "<|im_start|>assistant\n"),
        ({"tools": [TOOL], "tool_choice": "none"}, "<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, ""),
        ({"documents": [{"text": "d"}]}, '[{"text": "d"}]<|im_start|>assistant\n'),
        ({"reasoning_effort": "low"}, "low<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"extra": "more"}}, "more<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"messages": [], "tools": ["x"]}}, "<|im_start|>assistant\n"),
        ({"tools": []}, "<|im_start|>assistant\n"),
        (_call_tool('{"city": "Rome"}'), "Rome<|im_start|>assistant\n"),
        (_call_tool({"city": "Rome"}), "Rome<|im_start|>assistant\n"),
        (_call_tool("city: Rome"), "<|im_start|>assistant\n"),
        (_call_tool(""), "<|im_start|>assistant\n"),
    ],
    ids=[
        "tools",
        "no tools wanted",
        "no generation prompt",
        "documents",
        "effort",
        "own variables",
        "variables of others' names",
        "an empty list of tools",
        "arguments as JSON",
        "arguments as an object",
        "arguments as text",
        "no arguments",
    ],
)
async def test_what_a_chat_gives_to_the_template_is_rendered(client, plane, text, fields, rest):
    response = await client.post("/v1/chat/completions", json=make_chat(**fields))
    assert response.status_code == 200, response.text
    prompt = "".join(text.decode_token(token_id)[0] for token_id in plane.admitted[0].prompt_token_ids)
    assert prompt.partition("<|im_end|>\n")[2] == rest


HELLO, SPECIAL, END_OF_TEXT = "hello world, hello there", 1, 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("fields", "shown", "stop_reason", "finish_reason"),
    [
        ({}, HELLO, None, "stop"),
        ({"stop": "world"}, "hello ", "world", "stop"),
        ({"stop": "world", "include_stop_str_in_output": True}, "hello world", "world", "stop"),
        ({"stop": "hello"}, "", "hello", "stop"),
        ({"stop": "hello", "min_tokens": 3}, "hello world, ", "hello", "stop"),
        ({"skip_special_tokens": False}, HELLO + "<|im_start|>", None, "stop"),
        ({"max_tokens": 1}, "he", None, "length"),
        ({"stop_token_ids": [SPECIAL], "skip_special_tokens": False}, HELLO, SPECIAL, "stop"),
    ],
    ids=[
        "to its end",
        "stop string",
        "stop string included",
        "stop string at the start",
        "stop string before min_tokens",
        "special tokens shown",
        "length",
        "stop token",
    ],
)
async def test_output_is_cut_and_shown_as_asked(client, plane, text, stream, fields, shown, stop_reason, finish_reason):
    ids = [*text.encode_now(HELLO, add_special_tokens=False), SPECIAL, 2]
    plane.script = lambda _: ids
    response = await client.post(
        "/v1/completions", json=make_completion(**{"max_tokens": 50, "stream": stream, **fields})
    )
    if stream:
        events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
        choices = [event["choices"][0] for event in events]
    else:
        choices = [response.json()["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == shown
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish_reason]
    assert choices[-1]["stop_reason"] == stop_reason


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_what_was_held_back_comes_before_an_incomplete_character(client, plane, text, stream):
    ids = text.encode_now("ab🎉", add_special_tokens=False)[:-1]
    plane.script = lambda _: [*ids, 2]
    response = await client.post("/v1/completions", json=make_completion(stop="abc", stream=stream))
    if stream:
        events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
        assert "".join(event["choices"][0]["text"] for event in events) == "ab\ufffd"
    else:
        assert response.json()["choices"][0]["text"] == "ab\ufffd"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 6}, 6),
    ],
)
async def test_newer_name_of_the_output_limit_wins(client, plane, fields, limit):
    await client.post("/v1/chat/completions", json=make_chat(**fields))
    assert plane.admitted[0].sampling.max_tokens == limit


@pytest.mark.parametrize("excess", [0, 1])
async def test_body_may_be_as_large_as_the_limit_and_no_larger(client, excess):
    def body(padding):
        return json.dumps(make_completion(user="u" * padding)).encode()

    data = body(20_000 + excess - len(body(0)))

    async def in_parts():
        yield data[:10_000]
        yield data[10_000:]

    for content in (data, in_parts()):
        response = await client.post("/v1/completions", content=content)
        assert response.status_code == (413 if excess else 200)


AT_THEIR_LIMITS = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-6, 100),
    "seed": (-(2**63), 2**63 - 1),
    "min_tokens": (0, 16),
    "n": (1, 128),
    "prompt": (["a"], ["a"] * 128),
    "model": (None, "tiny"),
    "stop": (["a"], ["a" * 1000] * 16),
    "stop_token_ids": ([0], [399] * 256),
    "logit_bias": ({"0": -100}, {"399": 100}),
    "bad_words": (["a"], ["a" * 1000] + ["b"] * 255),
    "logprobs": (0, 20),
    "cache_salt": ("s", "s" * 256),
    "guided_choice": (["a"], [f"a{number}" for number in range(1024)]),
    "guided_json": ({}, {"type": "array", "minItems": 20_000}),
    "sluice": (
        {"slo_ttft_ms": 1, "slo_tpot_ms": 1, "priority": -1000},
        {"slo_ttft_ms": 600_000, "slo_tpot_ms": 60_000, "priority": 1000},
    ),
}


@pytest.mark.parametrize("field", AT_THEIR_LIMITS)
@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
async def test_values_at_their_limits_are_accepted(client, field, end):
    response = await client.post("/v1/completions", json=make_completion(**{field: AT_THEIR_LIMITS[field][end]}))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("excess", [0, 1])
def test_names_in_headers_may_be_as_long_as_their_limits_and_no_longer(excess):
    request_id, slo_class = "r" * (128 + excess), "c" * (256 + excess)
    assert choose_shown_id(request_id, RequestId("req-1")) == ("req-1" if excess else request_id)
    headers = {"X-Sluice-Slo-Class": slo_class, "x-sluice-slo-class": slo_class}
    if not excess:
        assert check_request_id("x-request-id", request_id) == request_id
        assert read_objectives(headers, None).slo_class == slo_class
        return
    with pytest.raises(FieldError, match="x-request-id: at most 128 characters, not 129"):
        check_request_id("x-request-id", request_id)
    with pytest.raises(FieldError, match="x-sluice-slo-class: at most 256 characters, not 257"):
        read_objectives(headers, None)


@pytest.mark.parametrize(("ttft_ms", "tpot_ms", "priority"), [("1", "1", "-1000"), ("600000", "60000", "1000")])
async def test_headers_at_their_limits_are_accepted(client, plane, ttft_ms, tpot_ms, priority):
    headers = {
        "x-sluice-slo-ttft-ms": ttft_ms,
        "x-sluice-slo-tpot-ms": tpot_ms,
        "x-sluice-priority": priority,
        "x-request-id": "r" * 128,
    }
    response = await client.post("/v1/completions", json=make_completion(), headers=headers)
    assert response.status_code == 200, response.text
    (request,) = plane.admitted
    assert (request.ttft_slo_s, request.tpot_slo_s) == (int(ttft_ms) / 1000, int(tpot_ms) / 1000)
    assert (request.priority, request.client_request_id) == (int(priority), "r" * 128)
