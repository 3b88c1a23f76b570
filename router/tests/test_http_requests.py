"""Requests over HTTP: what is accepted and how it reaches the data plane, what is refused and how."""

from __future__ import annotations

import json
from urllib.parse import quote

import harness_faults
import httpx
import pytest
from edge_fakes import FakePlane, say

from sluice_router.api.http_api import HttpApi
from sluice_router.api.http_settings import HttpSettings
from sluice_router.errors import NoEngineError, ShuttingDownError
from sluice_router.scheduling.requests import ServedModel

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
async def plane(text):
    return FakePlane(say(text, "hello world"))


@pytest.fixture
async def client(plane, text):
    api = HttpApi(plane, text, HttpSettings(max_body_bytes=20_000))
    port = await api.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as made:
        yield made
    await api.close(0.1)


def _completion(**fields):
    return {"model": "tiny", "prompt": "hi", **fields}


def _chat(**fields):
    return {"model": "tiny", "messages": MESSAGES, **fields}


WRONG_COMPLETIONS = [
    # id, fields, param, words of the message
    ("no-prompt", {"prompt": None}, "prompt", ["prompt"]),
    ("empty-prompt", {"prompt": ""}, "prompt", ["empty"]),
    ("empty-ids", {"prompt": []}, "prompt", ["empty"]),
    ("empty-prompt-of-two", {"prompt": ["a", ""]}, "prompt[1]", ["empty"]),
    ("second-prompt-number", {"prompt": ["a", 5]}, "prompt[1]", ["5"]),
    ("second-prompt-text", {"prompt": [[5], "a"]}, "prompt[1]", ["'a'"]),
    ("id-of-second-prompt", {"prompt": [[5], [6, 400]]}, "prompt[1][1]", ["400"]),
    ("second-prompt-too-long", {"prompt": [[5], [5] * 512]}, "prompt[1]", ["512"]),
    ("many-ids", {"prompt": ["a"] * 512}, "prompt", ["512"]),
    ("wrong-ids", {"prompt": [-1] * 512}, "prompt", ["512", "limit"]),
    ("many-wrong-ids", {"prompt": [[5], [-1] * 512]}, "prompt[1]", ["512", "limit"]),
    ("many-prompts", {"prompt": ["a"] * 129}, "prompt", ["129", "128"]),
    ("many-prompts-and-n", {"prompt": ["a"] * 65, "n": 2}, "prompt", ["65", "2", "128", "130"]),
    ("prompt-number", {"prompt": 7}, "prompt", ["7"]),
    ("prompt-mixed", {"prompt": [1, "a"]}, "prompt[1]", ["'a'"]),
    ("prompt-negative-id", {"prompt": [1, -1]}, "prompt[1]", ["-1", "0"]),
    ("prompt-id-over", {"prompt": [1, 400]}, "prompt[1]", ["400"]),
    ("prompt-too-long", {"prompt": [5] * 512}, "prompt", ["512"]),
    ("prompt-and-output-too-long", {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", ["512", "500", "13", "513"]),
    ("model-number", {"model": 3}, "model", ["3"]),
    ("max-tokens-zero", {"max_tokens": 0}, "max_tokens", ["0", "1"]),
    ("max-tokens-text", {"max_tokens": "5"}, "max_tokens", ["'5'"]),
    ("max-tokens-fraction", {"max_tokens": 1.5}, "max_tokens", ["1.5"]),
    ("max-tokens-true", {"max_tokens": True}, "max_tokens", ["True"]),
    ("max-tokens-huge", {"max_tokens": 10**30}, "max_tokens", ["1000"]),
    ("min-tokens-over", {"max_tokens": 4, "min_tokens": 5}, "min_tokens", ["4", "5"]),
    ("temperature-over", {"temperature": 2.5}, "temperature", ["2.5", "2"]),
    ("temperature-negative", {"temperature": -0.1}, "temperature", ["-0.1", "0"]),
    ("temperature-text", {"temperature": "warm"}, "temperature", ["'warm'"]),
    ("top-p-zero", {"top_p": 0}, "top_p", ["0"]),
    ("top-p-over", {"top_p": 1.01}, "top_p", ["1.01", "1"]),
    ("top-k", {"top_k": -2}, "top_k", ["-2", "-1"]),
    ("min-p", {"min_p": 1.5}, "min_p", ["1.5"]),
    ("presence", {"presence_penalty": 2.1}, "presence_penalty", ["2.1"]),
    ("frequency", {"frequency_penalty": -2.1}, "frequency_penalty", ["-2.1"]),
    ("repetition", {"repetition_penalty": 0}, "repetition_penalty", ["0"]),
    ("seed", {"seed": 2**63}, "seed", ["9223372036854775807"]),
    ("stop-empty", {"stop": ["a", ""]}, "stop[1]", ["''", "1"]),
    ("stop-many", {"stop": ["x"] * 17}, "stop", ["16", "17"]),
    ("stop-number", {"stop": 4}, "stop", ["4"]),
    ("stop-token", {"stop_token_ids": [400]}, "stop_token_ids[0]", ["400"]),
    ("bias-key", {"logit_bias": {"x": 1}}, "logit_bias", ["'x'"]),
    ("bias-key-over", {"logit_bias": {"400": 1}}, "logit_bias", ["399", "'400'"]),
    ("bias-value", {"logit_bias": {"5": 101}}, "logit_bias.5", ["101", "100"]),
    ("bad-word", {"bad_words": [""]}, "bad_words[0]", ["''"]),
    ("logprobs", {"logprobs": 21}, "logprobs", ["21", "20"]),
    ("logprobs-flag", {"logprobs": True}, "logprobs", ["True"]),
    ("stream", {"stream": "yes"}, "stream", ["'yes'"]),
    ("stream-options", {"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
    ("n", {"n": 0}, "n", ["0", "1"]),
    ("n-over", {"n": 129}, "n", ["129", "128"]),
    ("n-true", {"n": True}, "n", ["True"]),
    ("best-of", {"best_of": 3}, "best_of", ["best_of", "3"]),
    ("echo", {"echo": True}, "echo", ["echo"]),
    ("suffix", {"suffix": "end"}, "suffix", ["'end'"]),
    ("priority", {"priority": 3}, "priority", ["sluice.priority"]),
    ("format", {"response_format": {"type": "xml"}}, "response_format.type", ["'xml'", "json_object"]),
    ("format-no-schema", {"response_format": {"type": "json_schema"}}, "response_format", ["schema"]),
    (
        "schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "int"}}}},
        "response_format.json_schema.schema",
        ["type"],
    ),
    ("guided-json", {"guided_json": "{"}, "guided_json", ["JSON"]),
    ("guided-json-list", {"guided_json": "[1]"}, "guided_json", ["[1]"]),
    ("guided-json-deep", {"guided_json": "[" * 4000}, "guided_json", ["nested"]),
    ("guided-regex", {"guided_regex": "(a"}, "guided_regex", ["(a"]),
    *[
        (f"cannot-compile-{value}", {"structured_outputs": {kind: value}}, f"structured_outputs.{kind}", words)
        for kind, value, words in (
            ("regex", "(?=a)b", ["look-around", "(?=a)b"]),
            ("regex", r"(a)\1", ["backreferences"]),
            ("grammar", "root ::= ", ["empty", "root ::="]),
            ("grammar", "root ::= root", ["allows no output"]),
            ("grammar", "root ::= foo", ["'foo' not found"]),
            ("json", {"$ref": "#"}, ["allows no output"]),
            ("json", {"type": "array", "uniqueItems": True}, ["uniqueItems"]),
            ("json", {"type": "array", "minItems": 10_000_000}, ["minItems", "1e+07", "20000"]),
            ("json", {"anyOf": [{"items": {"type": "array", "maxItems": 10_001}}] * 2}, ["20002", "20000"]),
        )
    ],
    ("guided-choice", {"guided_choice": []}, "guided_choice", ["1"]),
    ("guided-choice-empty", {"guided_choice": ["a", ""]}, "guided_choice", ["empty"]),
    (
        "two-constraints",
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        ["only one"],
    ),
    ("structured", {"structured_outputs": {"regex": "["}}, "structured_outputs.regex", ["["]),
    (
        "structured-tag",
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        ["structural_tag", "'{}'", "grammar, json, json_object, regex"],
    ),
    (
        "structured-unknown",
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        ["not supported", "' '"],
    ),
    (
        "sluice-unknown",
        {"sluice": {"slo_ttft": 5}},
        "sluice.slo_ttft",
        ["not supported", "5", "slo_ttft_ms"],
    ),
    (
        "sluice-hostile-name",
        {"sluice": {"a\r\nb": 5}},
        "sluice.'a\\r\\nb'",
        ["not supported"],
    ),
    ("sluice-ttft", {"sluice": {"slo_ttft_ms": 0}}, "sluice.slo_ttft_ms", ["0", "1"]),
    ("sluice-tpot", {"sluice": {"slo_tpot_ms": 60_001}}, "sluice.slo_tpot_ms", ["60001", "60000"]),
    ("sluice-priority", {"sluice": {"priority": 1001}}, "sluice.priority", ["1001", "1000"]),
    ("sluice-class", {"sluice": {"slo_class": "gold"}}, "slo_class", ["gold"]),
]
WRONG_CHATS = [
    ("no-messages", {"messages": None}, "messages", ["None"]),
    ("empty-messages", {"messages": []}, "messages", ["1"]),
    ("message-text", {"messages": ["hi"]}, "messages[0]", ["'hi'"]),
    ("many-messages", {"messages": [0] * 4097}, "messages", ["4096", "4097"]),
    ("role", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", ["'boss'"]),
    ("no-role", {"messages": [{"content": "x"}]}, "messages[0].role", ["required"]),
    ("content-number", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5"]),
    (
        "image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        ["image_url", "not supported"],
    ),
    ("template-refuses", {"messages": [{"role": "tool", "content": "x"}]}, "messages", ["no tools here"]),
    ("top-logprobs-alone", {"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ("top-logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
    ("logprobs-number", {"logprobs": 3}, "logprobs", ["3"]),
    ("tool-choice", {"tool_choice": "required"}, "tool_choice", ["required", "auto"]),
    ("functions", {"functions": [{"name": "f"}]}, "functions", ["not supported"]),
    ("audio", {"modalities": ["text", "audio"]}, "modalities", ["not supported"]),
    ("template", {"chat_template": "{{ x }}"}, "chat_template", ["not supported"]),
    ("max", {"max_completion_tokens": 512}, "max_completion_tokens", ["512"]),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        *[
            pytest.param("/v1/completions", _completion(**f), p, w, id=f"completion-{i}")
            for i, f, p, w in WRONG_COMPLETIONS
        ],
        *[pytest.param("/v1/chat/completions", _chat(**f), p, w, id=f"chat-{i}") for i, f, p, w in WRONG_CHATS],
    ],
)
async def test_wrong_fields_are_named_with_value_and_limit(client, plane, path, body, param, words):
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert all(word in error["message"] for word in words), error
    assert response.headers["x-sluice-reason"] == error["code"]
    assert not plane.admitted


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"prompt": "\xff"}', id="not-utf8"),
        pytest.param(b'{"prompt": "\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"prompt": "x", "temperature": NaN}', id="nan"),
        pytest.param(b"[" * 5000, id="deep"),
        pytest.param(b'{"prompt": "x"} trailing', id="trailing"),
    ],
)
async def test_what_is_not_a_json_object_is_refused(client, plane, body):
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x-sluice-slo-ttft-ms", "0", ["'0'", "1", "600000"]),
        ("x-sluice-slo-ttft-ms", "soon", ["'soon'"]),
        ("x-sluice-slo-ttft-ms", "1_000", ["'1_000'"]),
        ("x-sluice-slo-ttft-ms", "9" * 5000, ["600000"]),
        ("x-sluice-slo-tpot-ms", "60001", ["60000"]),
        ("x-llm-d-slo-tpot-ms", "1.5", ["'1.5'"]),
        ("x-sluice-priority", "-1001", ["-1000"]),
        ("x-sluice-slo-ttft", "400", ["no header", "x-sluice-slo-ttft-ms"]),
        ("Content-Encoding", "snappy", ["'snappy'", "gzip"]),
        ("Content-Encoding", "gzip, snappy", ["'gzip, snappy'", "gzip"]),
        ("x-sluice-slo-class", "c" * 300, ["256", "300"]),
        ("x-request-id", "r" * 129, ["128", "129"]),
        ("x-request-id", "a\tb", ["printable"]),
    ],
)
async def test_wrong_headers_are_named_with_value_and_limit(client, plane, name, value, words):
    response = await client.post("/v1/completions", json=_completion(), headers={name: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == name
    assert all(word in error["message"] for word in [name, *words]), error
    assert not plane.admitted


async def test_last_given_objective_wins(client, plane):
    headers = {
        "x-sluice-slo-ttft-ms": "500",
        "x-llm-d-slo-ttft-ms": "600",
        "x-llm-d-slo-tpot-ms": "70",
        "x-sluice-slo-class": "chat",
        "x-sluice-priority": "3",
    }
    await client.post("/v1/completions", json=_completion(), headers=headers)
    body = _completion(sluice={"slo_tpot_ms": 80, "slo_class": "batch", "priority": -2})
    await client.post("/v1/completions", json=body, headers=headers)
    await client.post("/v1/completions", json=_completion())
    seen = [(r.ttft_slo_s, r.tpot_slo_s, r.slo_class, r.priority) for r in plane.admitted]
    assert seen == [(0.5, 0.07, "chat", 3), (0.5, 0.08, "batch", -2), (None, None, "", None)]


async def test_seed_of_minus_one_is_none(client, plane):
    await client.post("/v1/completions", json=_completion(seed=-1))
    await client.post("/v1/completions", json=_completion(seed=-2))
    assert [r.sampling.seed if r.sampling.HasField("seed") else None for r in plane.admitted] == [None, -2]


async def test_absent_fields_take_the_models_then_the_neutral_defaults(client, plane):
    await client.post("/v1/completions", json=_completion())
    await client.post("/v1/chat/completions", json=_chat(temperature=0, top_k=-1, top_p=0.5))
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
            _completion(prompt=prompt)
            if path == "/v1/completions"
            else _chat(messages=[{"role": "user", "content": prompt}])
        )

    await client.post(path, json=ask(1))
    one = len(plane.admitted.pop().prompt_token_ids)
    body = ask(1 + 512 - room - one) | ({} if asked is None else {"max_tokens": asked})
    assert (await client.post(path, json=body)).status_code == 200
    assert len(plane.admitted[0].prompt_token_ids) == 512 - room
    assert plane.admitted[0].sampling.max_tokens == max_tokens


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
    await client.post("/v1/completions", json=_completion(**fields))
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
    response = await client.post("/v1/chat/completions", json=_chat(**fields))
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
    assert (await client.post("/v1/completions", json=_completion(**fields))).status_code == 200
    assert (
        await client.post("/v1/chat/completions", json=_chat(modalities=["text"], functions=None))
    ).status_code == 200


async def test_unknown_fields_are_ignored_and_named(client, plane):
    stream_options = {"include_usage": True, "continuous_usage_stats": True}
    response_format = {"type": "text", "strict": True}
    fields = {"user": "me", "zebra": 1, "stream_options": stream_options, "response_format": response_format}
    response = await client.post("/v1/completions", json=_completion(stream=True, **fields))
    assert response.status_code == 200
    ignored = response.headers["x-sluice-ignored"]
    assert ignored == "response_format.strict, stream_options.continuous_usage_stats, user, zebra"
    assert "x-sluice-ignored" not in (await client.post("/v1/completions", json=_completion())).headers


async def test_hostile_names_of_unknown_fields_do_not_break_the_header(client, plane):
    response = await client.post("/v1/completions", json=_completion(**{"a\r\nx-evil: 1": 1, "é": 2, "k" * 5000: 3}))
    assert response.status_code == 200
    assert "x-evil" not in response.headers
    assert len(response.headers["x-sluice-ignored"]) <= 1100


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]], ids=["ids", "list-of-one"])
async def test_token_ids_are_used_as_they_are(client, plane, prompt):
    answer = await client.post("/v1/completions", json=_completion(prompt=prompt, return_token_ids=True))
    assert list(plane.admitted[0].prompt_token_ids) == [5, 6, 7]
    choice = answer.json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["token_ids"][-1] == 2


async def test_stream_returns_every_token_id_once(client, plane, text):
    body = _completion(prompt=[5, 6], stream=True, return_token_ids=True)
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
    await client.post("/v1/chat/completions", json=_chat(messages=[{"role": "user", "content": parts}], tools=tools))
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
        "arguments as JSON",
        "arguments as an object",
        "arguments as text",
        "no arguments",
    ],
)
async def test_what_a_chat_gives_to_the_template_is_rendered(client, plane, text, fields, rest):
    response = await client.post("/v1/chat/completions", json=_chat(**fields))
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
    response = await client.post("/v1/completions", json=_completion(**{"max_tokens": 50, "stream": stream, **fields}))
    if stream:
        events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
        choices = [event["choices"][0] for event in events]
    else:
        choices = [response.json()["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == shown
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [finish_reason]
    assert choices[-1]["stop_reason"] == stop_reason


async def test_what_was_held_back_comes_before_an_incomplete_character(client, plane, text):
    ids = text.encode_now("ab🎉", add_special_tokens=False)[:-1]
    plane.script = lambda _: [*ids, 2]
    response = await client.post("/v1/completions", json=_completion(stop="abc"))
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
    await client.post("/v1/chat/completions", json=_chat(**fields))
    assert plane.admitted[0].sampling.max_tokens == limit


@pytest.mark.parametrize("excess", [0, 1])
async def test_body_may_be_as_large_as_the_limit_and_no_larger(client, excess):
    def body(padding):
        return json.dumps(_completion(user="u" * padding)).encode()

    data = body(20_000 + excess - len(body(0)))

    async def in_parts():
        yield data[:10_000]
        yield data[10_000:]

    for content in (data, in_parts()):
        response = await client.post("/v1/completions", content=content)
        assert response.status_code == (413 if excess else 200)


async def test_stream_has_its_headers(client):
    response = await client.post("/v1/completions", json=_completion(stream=True, user="me"))
    names = ("content-type", "cache-control", "x-sluice-ignored", "server")
    assert [response.headers[name] for name in names] == [
        "text/event-stream; charset=utf-8",
        "no-cache",
        "user",
        "sluice",
    ]


async def test_usage_tells_how_the_request_was_served(client):
    usage = (await client.post("/v1/completions", json=_completion(prompt=[5, 6, 7], max_tokens=2))).json()["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
        "ttft_ms": 12.5,
        "tpot_ms": 5.0,
        "hand_offs": 1,
        "recoveries": 2,
        "slo_met": True,
    }


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_request_id_is_echoed_or_given(client, plane, stream):
    given = await client.post("/v1/completions", json=_completion(stream=stream), headers={"x-request-id": "mine"})
    made = await client.post("/v1/completions", json=_completion(stream=stream))
    assert given.headers["x-request-id"] == "mine"
    assert made.headers["x-request-id"] == "req-2"
    assert plane.admitted[0].client_request_id == "mine"
    assert plane.admitted[1].request_id == "req-2"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("mine", "mine"), (None, "req-1"), ("r" * 129, "req-1"), ("a\tb", "req-1")],
    ids=["given", "none", "too-long", "not-printable"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/debug/requests/none"])
async def test_refusals_carry_an_id(client, plane, path, given, shown):
    headers = {} if given is None else {"x-request-id": given}
    method = "GET" if path.startswith("/debug") else "POST"
    refused = await client.request(method, path, json={"prompt": 7}, headers=headers)
    assert refused.status_code >= 400
    assert refused.headers["x-request-id"] == shown


async def test_refusal_of_the_data_plane_carries_an_id(client, plane):
    plane.refusal = NoEngineError("no engine", retry_after_s=1)
    assert (await client.post("/v1/completions", json=_completion())).headers["x-request-id"] == "req-1"


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [("/v1/completions", _completion(), "cmpl-"), ("/v1/chat/completions", _chat(), "chatcmpl-")],
    ids=["completion", "chat"],
)
async def test_id_of_an_answer_is_explained(client, plane, path, body, prefix):
    answer_id = (await client.post(path, json=body, headers={"x-request-id": "mine"})).json()["id"]
    assert answer_id == prefix + plane.admitted[0].request_id
    plane.stories[plane.admitted[0].request_id] = {"events": ["one"]}
    assert (await client.get(f"/debug/requests/{answer_id}")).json() == {"events": ["one"]}
    plane.stories[answer_id] = {"events": ["a client's own id"]}
    assert (await client.get(f"/debug/requests/{answer_id}")).json() == {"events": ["a client's own id"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(client, plane, text, path):
    limit = 512 * text.max_token_characters
    field = "prompt" if path == "/v1/completions" else "messages"
    bodies = {
        size: _completion(prompt="." * size)
        if field == "prompt"
        else _chat(messages=[{"role": "user", "content": "." * size}])
        for size in (513, limit + 1)
    }
    tokenized = "sluice_tokenize_seconds_count {}"
    for size, num_tokenized in ((limit + 1, "0.0"), (513, "1.0")):
        response = await client.post(path, json=bodies[size])
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert "512 tokens" in error["message"]
        assert (f"no more than {limit} can fit" in error["message"]) == (size > limit)
        assert tokenized.format(num_tokenized) in (await client.get("/metrics")).text
    assert not plane.admitted


async def test_unknown_model(client):
    response = await client.post("/v1/completions", json=_completion(model="gpt-7"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "tiny" in response.json()["error"]["message"]


async def test_retry_after_is_rounded_up(client, plane):
    plane.refusal = NoEngineError("no engine", retry_after_s=1.01)
    response = await client.post("/v1/completions", json=_completion())
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    plane.refusal = ShuttingDownError("leaving")
    response = await client.post("/v1/completions", json=_completion())
    assert response.json()["error"]["code"] == response.headers["x-sluice-reason"] == "draining"
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("PUT", "/livez", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unsupported_endpoint"),
        ("POST", "/v1/responses", 404, "unsupported_endpoint"),
        ("GET", "/", 404, "unsupported_endpoint"),
        ("POST", "/v1/completions/", 404, "unsupported_endpoint"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other%2Fmodel", 404, "model_not_found"),
        ("GET", "/debug/requests/none", 404, "unknown_request"),
    ],
)
async def test_other_paths_and_methods(client, method, path, status, code):
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers["x-sluice-reason"] == code
    allowed = "POST" if path == "/v1/completions" else "GET, HEAD"
    assert response.headers.get("allow") == (allowed if status == 405 else None)


async def test_pages(client, plane):
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 512
    plane.stories["req-9"] = {"events": []}
    assert (await client.get("/debug/requests/req-9")).json() == {"events": []}
    for path in ("/health", "/readyz"):
        plane.not_ready_reason = ""
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code == 200
        plane.not_ready_reason = "no plan"
        response = await client.get(path)
        assert (response.status_code, response.json()["reason"]) == (503, "no plan")


@pytest.mark.parametrize("request_id", ["a?b", "../../version", "a%2Fb", "a/b", "a#b", "a b"])
async def test_any_id_is_explained(client, plane, request_id):
    plane.stories[request_id] = {"events": [request_id]}
    url = httpx.URL(f"{client.base_url}/debug/requests/{quote(request_id, safe='')}")
    assert (await client.get(url)).json() == {"events": [request_id]}


async def test_metrics_count_answers_by_status_and_reason(client, plane):
    await client.post("/v1/completions", json=_completion())
    await client.post("/v1/completions", json=_completion(temperature=9))
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'sluice_answers_total{protocol="http",reason="",status="200"} 1.0' in response.text
    assert 'sluice_answers_total{protocol="http",reason="invalid_value",status="400"} 1.0' in response.text
    assert "sluice_tokenize_seconds_count 1.0" in response.text


async def test_no_plan_yet_is_not_an_unknown_model(client, plane):
    plane.model = ServedModel(name="", max_model_len_tokens=0, created_s=0)
    plane.refusal = NoEngineError("no plan is in force", retry_after_s=1)
    assert (await client.post("/v1/completions", json=_completion())).status_code == 503
    assert (await client.get("/v1/models")).json()["data"] == []


async def test_our_own_fault_is_an_answer_too(client, plane):
    plane.refusal = ZeroDivisionError("a bug")
    response = await client.post("/v1/completions", json=_completion())
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "a bug" not in response.text
    assert ["ZeroDivisionError: a bug" in fault for fault in harness_faults.take()] == [True]
