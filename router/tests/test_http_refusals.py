"""Requests over HTTP that are refused, with the field, the value and the limit."""

from __future__ import annotations

import pytest
from edge_fakes import FakePlane, say
from http_requests_harness import make_chat, make_completion, serving_client

from sluice_router.api.http.http_errors import refuse
from sluice_router.api.openai_requests import FieldError
from sluice_router.api.request_preparation import to_router_error
from sluice_router.api.structured_output import check_constraint
from sluice_router.errors import NotAllowedError, QueueFullError, UnauthenticatedError


@pytest.fixture
async def plane(text):
    return FakePlane(say(text, "hello world"))


@pytest.fixture
async def client(plane, text):
    async with serving_client(plane, text) as made:
        yield made


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
    ("best-of-true", {"best_of": True}, "best_of", ["best_of", "True"]),
    ("echo", {"echo": True}, "echo", ["echo"]),
    ("echo-number", {"echo": 0}, "echo", ["echo", "0"]),
    ("priority-flag", {"priority": False}, "priority", ["priority", "False"]),
    ("suffix", {"suffix": "end"}, "suffix", ["'end'"]),
    ("priority", {"priority": 3}, "priority", ["sluice.priority"]),
    ("format", {"response_format": {"type": "xml"}}, "response_format.type", ["'xml'", "json_object"]),
    (
        "format-schema-of-others",
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "response_format.schema",
        ["not supported", "json_schema"],
    ),
    *[
        (
            f"format-schema-of-{kind}",
            {"response_format": {"type": kind, "json_schema": {"schema": {"type": "object"}}}},
            "response_format.json_schema",
            ["json_schema", kind],
        )
        for kind in ("text", "json_object")
    ],
    (
        "format-unknown-beside-schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "whitespace": " "}}},
        "response_format.json_schema.whitespace",
        ["not supported", "' '"],
    ),
    ("format-no-schema", {"response_format": {"type": "json_schema"}}, "response_format", ["schema"]),
    (
        "schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "int"}}}},
        "response_format.json_schema.schema",
        ["type"],
    ),
    ("guided-json", {"guided_json": "{"}, "guided_json", ["JSON"]),
    ("guided-json-list", {"guided_json": "[1]"}, "guided_json", ["[1]"]),
    # From Python 3.14 on, this can be read as far as it goes.
    ("guided-json-deep", {"guided_json": "[" * 4000}, "guided_json", ["JSON"]),
    ("guided-json-deep-schema", {"guided_json": '{"not": ' * 400 + "{}" + "}" * 400}, "guided_json", ["nested"]),
    ("guided-json-true", {"guided_json": "true"}, "guided_json", ["object", "True"]),
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
            pytest.param("/v1/completions", make_completion(**f), p, w, id=f"completion-{i}")
            for i, f, p, w in WRONG_COMPLETIONS
        ],
        *[pytest.param("/v1/chat/completions", make_chat(**f), p, w, id=f"chat-{i}") for i, f, p, w in WRONG_CHATS],
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
        ("x-llm-d-slo-ttft", "400", ["no header", "x-llm-d-slo-ttft-ms"]),
        ("Content-Encoding", "snappy", ["'snappy'", "gzip"]),
        ("Content-Encoding", "gzip, snappy", ["'gzip, snappy'", "gzip"]),
        ("x-sluice-slo-class", "c" * 300, ["256", "300"]),
        ("x-request-id", "r" * 129, ["128", "129"]),
        ("x-request-id", "a\tb", ["printable"]),
    ],
)
async def test_wrong_headers_are_named_with_value_and_limit(client, plane, name, value, words):
    response = await client.post("/v1/completions", json=make_completion(), headers={name: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == name
    assert all(word in error["message"] for word in [name, *words]), error
    assert not plane.admitted


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (QueueFullError("x", retry_after_s=0.0), 429, {"Retry-After": "1"}),
        (QueueFullError("x", retry_after_s=1.0), 429, {"Retry-After": "1"}),
        (QueueFullError("x", retry_after_s=1.1), 429, {"Retry-After": "2"}),
        (QueueFullError("x"), 429, {}),
        (UnauthenticatedError("x"), 401, {"WWW-Authenticate": "Bearer"}),
        (NotAllowedError("x"), 403, {}),
    ],
)
def test_a_refusal_says_when_to_try_again_and_how_to_say_who_asks(error, status, headers):
    response = refuse(error)
    shown = {name: value for name, value in response.headers.items() if not name.startswith("Content-")}
    assert (response.status, shown) == (status, {"x-sluice-reason": error.code, **headers})
    response = refuse(error, status=418, headers={"Allow": "GET"})
    assert (response.status, response.headers["Allow"]) == (418, "GET")


def test_a_fault_of_the_body_as_a_whole_is_no_fields():
    assert to_router_error(FieldError("", "why", "invalid_json")).param is None
    assert to_router_error(FieldError("n", "why")).param == "n"


@pytest.mark.parametrize("depth", [1_500, 50_000])
def test_a_schema_that_any_step_finds_nested_too_deeply_is_refused(depth: int) -> None:
    # Which step does depends on Python: from 3.14 on, more can be read than can be written.
    schema = '{"not": ' * depth + "{}" + "}" * depth
    with pytest.raises(FieldError, match="nested too deeply"):
        check_constraint(("guided_json", "json", schema))


def test_a_schema_that_compiles_and_is_too_complex_behind_its_first_brace_is_refused() -> None:
    parts = [{"type": "object", "properties": {f"{i}-{k}": {} for k in range(40)}} for i in range(60)]
    with pytest.raises(FieldError, match=r"guided_json: cannot be compiled: .*max is") as caught:
        check_constraint(("guided_json", "json", {"anyOf": parts}))
    assert caught.value.field == "guided_json"
    # A few of them are not.
    assert check_constraint(("guided_json", "json", {"anyOf": parts[:4]})).json_schema
