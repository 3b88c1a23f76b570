"""``sluice.v1.Router``: the same features, checks and errors as HTTP."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from data_plane_harness import until
from edge_fakes import ANSWER, LENGTH, STOP, write_model
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sluice.v1 import router_pb2, router_pb2_grpc, sampling_pb2
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.grpc.grpc_api import GrpcApi
from sluice_router.api.grpc.grpc_response_stream import GrpcResponseStream
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import EngineFaultError, SloInfeasibleError
from sluice_router.scheduling.requests import ServedModel
from sluice_router.text.output import Output, OutputSettings
from sluice_router.text.tokenizer import ModelText

Sampling = sampling_pb2.SamplingParams
USER = router_pb2.ChatMessage(role="user", content="hi")


@pytest.fixture
def metrics():
    return EdgeMetrics(SlowReaders(SlowReaderLimits()))


@pytest.fixture
async def channel(plane, text, metrics):
    api = GrpcApi(plane, text, metrics)
    port = await api.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as made:
        yield made
    await api.close(0)


@pytest.fixture
async def router(channel):
    return router_pb2_grpc.RouterStub(channel)


async def test_generate_streams_text_and_tokens_once(router, plane, text, metrics):
    call = router.Generate(router_pb2.GenerateRequest(text="hi", request_id="mine"))
    deltas = [delta async for delta in call]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert "".join(delta.text for delta in deltas) == ANSWER
    assert ids == [*text.encode_now(ANSWER, add_special_tokens=False), 2]
    assert [delta.first_output_index for delta in deltas] == [
        sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))
    ]
    assert deltas[-1].finish_reason == STOP
    assert deltas[-1].usage == router_pb2.Usage(
        prompt_tokens=len(plane.admitted[0].prompt_token_ids),
        output_tokens=len(ids),
        cached_tokens=3,
        ttft_ms=12.5,
        tpot_ms=5,
        num_hand_offs=1,
        is_slo_met=True,
        num_recoveries=2,
    )
    assert all(delta.finish_reason == 0 for delta in deltas[:-1])
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert metrics.answers == {("grpc", "OK", ""): 1}


async def test_absent_max_tokens_goes_up_to_the_models_length(router, plane):
    [_ async for _ in router.Generate(router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(values=[5, 6, 7])))]
    assert plane.admitted[0].sampling.max_tokens == 512 - 3
    assert list(plane.admitted[0].prompt_token_ids) == [5, 6, 7]


async def test_chat_uses_the_template(router, plane, text):
    messages = router_pb2.ChatMessages(values=[router_pb2.ChatMessage(role="user", content="hi")])
    [_ async for _ in router.Generate(router_pb2.GenerateRequest(messages=messages))]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(plane.admitted[0].prompt_token_ids) == text.encode_now(prompt, add_special_tokens=False)


async def test_salt_and_the_assistants_turn_are_as_asked_and_usage_counts_recoveries(router, plane, text):
    messages = router_pb2.ChatMessages(values=[USER], add_generation_prompt=False)
    request = router_pb2.GenerateRequest(messages=messages, cache_salt="mine")
    deltas = [delta async for delta in router.Generate(request)]
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    assert list(plane.admitted[0].prompt_token_ids) == text.encode_now(prompt, add_special_tokens=False)
    assert plane.admitted[0].cache_salt == "mine"
    assert deltas[-1].usage.num_recoveries == 2


async def test_a_model_without_a_template_is_told_of_in_this_apis_names(plane, tmp_path):
    write_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    model = ModelText.load(tmp_path)
    api = GrpcApi(plane, model, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    port = await api.start("127.0.0.1", 0)
    request = router_pb2.GenerateRequest(messages=router_pb2.ChatMessages(values=[USER]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"messages\.values: the model has no chat template") as caught:
            [_ async for _ in router_pb2_grpc.RouterStub(channel).Generate(request)]
    assert "/v1/" not in caught.value.details()
    await api.close(0)


async def test_sampling_and_objectives_reach_the_data_plane(router, plane):
    sampling = Sampling(
        max_tokens=5,
        min_tokens=2,
        temperature=0,
        top_k=7,
        seed=-3,
        stop_token_ids=[9],
        logit_bias={11: 1.5},
        num_logprobs=2,
        structured_output=sampling_pb2.StructuredOutput(regex="[ab]+"),
        bad_words=["no"],
    )
    request = router_pb2.GenerateRequest(
        model="tiny",
        text="hi",
        sampling=sampling,
        ttft_slo_milliseconds=250,
        tpot_slo_milliseconds=40,
        slo_class="chat",
        priority=-4,
    )
    deltas = [delta async for delta in router.Generate(request, timeout=20)]
    admitted = plane.admitted[0]
    assert (admitted.ttft_slo_s, admitted.tpot_slo_s, admitted.slo_class, admitted.priority) == (0.25, 0.04, "chat", -4)
    assert 0 < admitted.deadline_s - admitted.arrival_s < 21
    wanted = Sampling()
    wanted.CopyFrom(sampling)
    wanted.stop_token_ids[:] = [0, 2, 9]
    wanted.MergeFrom(Sampling(top_p=1, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1))
    assert admitted.sampling == wanted
    assert len(deltas[0].logprobs[0].top_token_ids) == 2
    assert deltas[-1].finish_reason == LENGTH


@pytest.mark.parametrize(("is_included", "answer"), [(False, "hello "), (True, "hello world")])
async def test_stop_strings_cut(router, is_included, answer):
    request = router_pb2.GenerateRequest(text="hi", stop=["world"], include_stop_str_in_output=is_included)
    deltas = [delta async for delta in router.Generate(request)]
    assert "".join(delta.text for delta in deltas) == answer
    assert deltas[-1].finish_reason == STOP


@pytest.mark.parametrize(("skips", "answer"), [(None, "hello"), (True, "hello"), (False, "<|im_start|>hello")])
async def test_special_tokens_are_skipped_unless_asked_for(router, plane, text, skips, answer):
    plane.script = lambda _: [*text.encode_now("<|im_start|>hello", add_special_tokens=False), 2]
    request = router_pb2.GenerateRequest(text="hi", skip_special_tokens=skips)
    assert "".join([delta.text async for delta in router.Generate(request)]) == answer


async def test_tools_documents_and_arguments_reach_the_template(plane, tmp_path):
    write_model(tmp_path)
    template = "{{ [messages, tools, documents, mood] | tojson }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    model = ModelText.load(tmp_path)
    tool, document = {"type": "function", "function": {"name": "f"}}, {"title": "one"}
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = router_pb2.ChatMessages(
        values=[
            router_pb2.ChatMessage(role="assistant", tool_calls=[json.dumps(call)]),
            router_pb2.ChatMessage(role="tool", content="2", tool_call_id="1"),
        ],
        tools=[json.dumps(tool)],
        documents=[json.dumps(document)],
        template_arguments='{"mood": 3}',
    )
    api = GrpcApi(plane, model, EdgeMetrics(SlowReaders(SlowReaderLimits())))
    port = await api.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        [_ async for _ in router_pb2_grpc.RouterStub(channel).Generate(router_pb2.GenerateRequest(messages=messages))]
    await api.close(0)
    detokenizer = model.make_detokenizer()
    prompt = "".join(map(detokenizer.step, plane.admitted[0].prompt_token_ids))
    opened = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert json.loads(prompt) == [
        [
            {"tool_calls": [opened], "role": "assistant", "content": ""},
            {"tool_call_id": "1", "role": "tool", "content": "2"},
        ],
        [tool],
        [document],
        3,
    ]
    model.close()


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_bytes_that_are_no_message_are_refused(channel, method, caplog):
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = kind(f"/sluice.v1.Router/{method}")(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method == "Generate" else call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["x-sluice-reason"] == "malformed_message"
    assert "Traceback" not in caplog.text


async def test_objectives_may_be_metadata_as_over_http(router, plane):
    metadata = (("x-sluice-slo-ttft-ms", "250"),)
    [_ async for _ in router.Generate(router_pb2.GenerateRequest(text="hi"), metadata=metadata)]
    assert plane.admitted[0].ttft_slo_s == 0.25
    with pytest.raises(grpc.aio.AioRpcError, match="x-sluice-slo-ttft is no header"):
        [
            _
            async for _ in router.Generate(
                router_pb2.GenerateRequest(text="hi"), metadata=(("x-sluice-slo-ttft", "2"),)
            )
        ]


@pytest.mark.parametrize(
    ("request_fields", "status", "words"),
    [
        pytest.param({}, grpc.StatusCode.INVALID_ARGUMENT, ["prompt is required"], id="no-prompt"),
        pytest.param({"text": "x", "model": "gpt"}, grpc.StatusCode.NOT_FOUND, ["gpt", "tiny"], id="model"),
        pytest.param(
            {"text": "x", "sampling": Sampling(temperature=3)},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["sampling.temperature", "3", "2"],
            id="temperature",
        ),
        pytest.param(
            {"text": "x", "sampling": Sampling(temperature=float("nan"))},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["sampling.temperature", "finite"],
            id="nan",
        ),
        pytest.param(
            {"text": "x", "sampling": Sampling(num_logprobs=99)},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["sampling.num_logprobs", "99", "20"],
            id="logprobs",
        ),
        pytest.param(
            {"text": "x", "ttft_slo_milliseconds": 900_000},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["ttft_slo_milliseconds", "900000", "600000"],
            id="slo",
        ),
        pytest.param({"text": "x", "slo_class": "gold"}, grpc.StatusCode.INVALID_ARGUMENT, ["gold"], id="class"),
        pytest.param({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, ["text:", "empty"], id="empty"),
        pytest.param(
            {"text": "x", "sampling": Sampling(structured_output=sampling_pb2.StructuredOutput(json_schema="{"))},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["sampling.structured_output.json_schema", "JSON"],
            id="schema",
        ),
        pytest.param(
            {"text": "x", "sampling": Sampling(max_tokens=3, min_tokens=4)},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["sampling.min_tokens", "3", "4"],
            id="min-tokens",
        ),
        *[
            pytest.param(
                {"messages": router_pb2.ChatMessages(values=[USER], **fields)},
                grpc.StatusCode.INVALID_ARGUMENT,
                words,
                id=words[0],
            )
            for fields, words in (
                ({"tools": ["{}", "["]}, ["messages.tools[1]", "JSON"]),
                ({"documents": ["7"]}, ["messages.documents[0]", "7"]),
                ({"template_arguments": "[1]"}, ["messages.template_arguments", "[1]"]),
            )
        ],
        pytest.param(
            {"token_ids": router_pb2.TokenIds(values=[1, 400])},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["token_ids.values[1]:", "400"],
            id="token-id",
        ),
        pytest.param(
            {"token_ids": router_pb2.TokenIds(values=[1] * 600)},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["token_ids.values:", "600", "512"],
            id="too-long",
        ),
        pytest.param(
            {"text": "x", "cache_salt": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, ["cache_salt", "256"], id="salt"
        ),
        pytest.param(
            {"text": "x", "request_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, ["request_id", "128"], id="id"
        ),
        pytest.param(
            {"messages": router_pb2.ChatMessages(values=[router_pb2.ChatMessage(role="boss", content="x")])},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["messages.values[0].role", "boss"],
            id="role",
        ),
        pytest.param(
            {"messages": router_pb2.ChatMessages(values=[USER] * 4097)},
            grpc.StatusCode.INVALID_ARGUMENT,
            ["messages.values: at most 4096 messages, not 4097"],
            id="messages",
        ),
    ],
)
async def test_wrong_requests_name_field_value_and_limit(router, plane, metrics, request_fields, status, words):
    call = router.Generate(router_pb2.GenerateRequest(**request_fields))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in call]
    assert caught.value.code() == status
    assert all(word in caught.value.details() for word in words), caught.value.details()
    metadata = dict(caught.value.trailing_metadata())
    assert metadata["x-request-id"] == "req-1"
    param = metadata["x-sluice-param"]
    assert param in ("model", "slo_class") or param in caught.value.details()
    assert metrics.answers == {("grpc", status.name, metadata["x-sluice-reason"]): 1}
    assert not plane.live


async def test_refusal_carries_retry_after(router, plane):
    plane.refusal = SloInfeasibleError("too late", retry_after_s=1.25)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in router.Generate(router_pb2.GenerateRequest(text="hi"))]
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = dict(caught.value.trailing_metadata())
    assert metadata["x-sluice-reason"] == "slo_infeasible"
    assert metadata["retry-after"] == "1.250"


async def test_fault_after_the_first_delta_has_the_tables_status(router, plane):
    plane.script = None
    call = router.Generate(router_pb2.GenerateRequest(text="hi"))
    reading = asyncio.create_task(call.read())
    await plane.wait(lambda: bool(plane.live))
    plane.emit("req-1", [100])
    assert list((await reading).token_ids) == [100]
    plane.fail("req-1", EngineFaultError("engines failed"))
    with pytest.raises(grpc.aio.AioRpcError, match="engines failed") as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_cancelled_call_is_cancelled_at_the_engine(router, plane, metrics):
    plane.script = None
    call = router.Generate(router_pb2.GenerateRequest(text="hi"))
    reading = asyncio.create_task(call.read())
    await plane.wait(lambda: bool(plane.live))
    call.cancel()
    await plane.wait(lambda: bool(plane.cancelled))
    assert plane.cancelled == [("req-1", "client_gone")]
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: metrics.answers == {("grpc", "CANCELLED", "client_gone"): 1})


async def test_passed_deadline_cancels_at_the_engine(router, plane):
    plane.script = None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in router.Generate(router_pb2.GenerateRequest(text="hi"), timeout=0.2)]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await plane.wait(lambda: bool(plane.cancelled))


async def test_models_health_and_reflection(channel, router, plane):
    models = await router.ListModels(router_pb2.ListModelsRequest())
    assert [(model.name, model.max_model_len_tokens) for model in models.models] == [("tiny", 512)]
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="sluice.v1.Router"))
    states = []
    async with asyncio.timeout(5):
        async for answer in watch:
            states.append(answer.status)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                plane.not_ready_reason = "no engine"
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
    assert states[-2:] == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
    names = [service.name async for answer in answers for service in answer.list_services_response.service]
    assert "sluice.v1.Router" in names


async def test_a_model_without_a_name_or_length_is_not_made_up(router, plane, text):
    for length, shown in ((99, 99), (0, text.defaults.max_model_len_tokens)):
        plane.model = ServedModel(name="tiny", max_model_len_tokens=length, created_s=0)
        (model,) = (await router.ListModels(router_pb2.ListModelsRequest())).models
        assert model.max_model_len_tokens == shown
    plane.model = ServedModel(name="", max_model_len_tokens=0, created_s=0)
    assert not (await router.ListModels(router_pb2.ListModelsRequest())).models


@pytest.mark.parametrize("service", ["", "sluice.v1.Router"])
async def test_health_follows_readiness(channel, plane, service):
    plane.not_ready_reason = "no engine"
    health, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(20):
        for reason in ("no engine", "", "no plan"):
            plane.not_ready_reason = reason
            expected = health_pb2.HealthCheckResponse.NOT_SERVING if reason else health_pb2.HealthCheckResponse.SERVING
            while (await health.Check(request)).status != expected:  # noqa: ASYNC110 - only the server knows
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_message_may_be_as_large_as_the_limit_and_no_larger(plane, text, metrics, excess):
    request = router_pb2.GenerateRequest(text="hi", stop=["x" * 500])
    api = GrpcApi(plane, text, metrics, max_message_bytes=request.ByteSize() - excess)
    port = await api.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(request)
        if excess:
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
                [_ async for _ in call]
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert [_ async for _ in call]
    await api.close(0)


@pytest.mark.parametrize("excess", [0, 1])
async def test_a_message_may_have_8_mib(router, excess):
    request = router_pb2.GenerateRequest(text="x" * (8 << 20))
    request.text = "x" * (2 * len(request.text) - request.ByteSize() + excess)
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max" if excess else "characters of prompt"):
        [_ async for _ in router.Generate(request)]


@pytest.mark.parametrize("announced_s", [None, 30.0, 0.0])
async def test_a_server_that_closes_lets_calls_end_for_the_shorter_of_its_times(plane, text, metrics, announced_s):
    api = GrpcApi(plane, text, metrics)
    port = await api.start("127.0.0.1", 0)
    plane.script = None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(router_pb2.GenerateRequest(text="hi"))
        reading = asyncio.create_task(call.read())
        await plane.wait(lambda: bool(plane.live))
        if announced_s is not None:
            api.announce_close(announced_s)
            api.announce_close(announced_s)
        closing = asyncio.create_task(api.close(30.0))
        if announced_s == 0.0:
            await plane.wait(lambda: bool(plane.cancelled))
            with pytest.raises(grpc.aio.AioRpcError):
                await reading
        else:
            plane.emit("req-1", [100])
            assert list((await reading).token_ids) == [100]
            plane.finish("req-1")
            assert (await call.read()).finish_reason == LENGTH
            assert await call.read() == grpc.aio.EOF
        async with asyncio.timeout(20):
            await closing
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_client_that_has_caught_up_is_slow_no_more(text):
    readers = SlowReaders(SlowReaderLimits(max_paused_s=5.0))
    shed: list[str] = []
    stream = GrpcResponseStream(Output(text, OutputSettings()), slow_readers=readers, cancel=lambda: shed.append("x"))
    # A token each, at these times; the first one finds the writer waiting.
    for now in (1.0, 2.0, 3.0):
        stream.on_token(70, None)
        stream.flush(now)
        if now == 1.0:
            await stream.next()
        assert (len(readers), stream.paused_since_s) == ((0, 0.0) if now == 1.0 else (1, 2.0))
    await stream.next()
    readers.sweep(100.0)
    assert (len(readers), shed) == (0, [])


async def test_slow_client_gets_larger_deltas_and_is_shed_at_its_limit(plane, text):
    readers = SlowReaders(SlowReaderLimits(max_stream_bytes=200_000))
    api = GrpcApi(plane, text, EdgeMetrics(readers))
    port = await api.start("127.0.0.1", 0)
    plane.script = None
    ids = text.encode_now("hello world " * 100, add_special_tokens=False)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(router_pb2.GenerateRequest(text="hi"))
        reading = asyncio.create_task(call.read())
        await plane.wait(lambda: bool(plane.live))
        response_stream = plane.live["req-1"].response_stream
        largest = 0
        plane.emit("req-1", ids)
        await reading
        async with asyncio.timeout(20):
            while "req-1" in plane.live:
                plane.emit("req-1", ids)
                largest = max(largest, response_stream.num_buffered_bytes)
                await asyncio.sleep(0)
        assert plane.cancelled == [("req-1", "slow_reader")]
        assert readers.num_shed == {"stream_bytes": 1}
        assert largest < 200_000 + 8 * len(ids) + len("hello world " * 100)
        call.cancel()
    await api.close(0)
