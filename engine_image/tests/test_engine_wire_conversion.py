"""Conversion between protobuf, core_messages and vLLM."""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2, sampling_pb2
from sluice.wire_fields import constraint_names
from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.engine_state import DuePrefills
from sluice_engine import core_encoding, core_messages
from sluice_engine.errors import SubmitRefusedError
from sluice_engine.server import wire_conversion
from sluice_engine.settings import EmulationSettings, EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

    from sluice_engine.server.request_builder import VllmRequestBuilder

# --- the EngineCore's contract ---------------------------------------------------------------------------------------


def test_names_are_the_cores():
    assert set(wire_conversion.CAUSES.values()) == {cause.value for cause in MoveCause}
    assert set(wire_conversion.ROLES.values()) == set(wire_conversion.WIRE_ROLES) == {role.value for role in Role}


def test_every_enum_value_but_the_unspecified_has_a_name():
    assert len(wire_conversion.CAUSES) == len(wire.MoveCause.keys()) - 1
    assert set(wire_conversion.ROLES) == set(plan_pb2.Role.values())


def test_every_number_of_a_load_is_reported():
    # Suspended prefills and switches of phases are metrics of the engine alone.
    others = {"generation", "is_draining", "num_suspended_prefills", "num_phase_switches", "under_way", "due"}
    fields = [name for name in core_messages.SchedulerLoad.__struct_fields__ if name not in others]
    load = core_messages.SchedulerLoad(is_draining=True, **{name: number for number, name in enumerate(fields, 1)})
    report = wire_conversion.load_report(load)
    assert {name: getattr(report, name) for name in fields} == {name: getattr(load, name) for name in fields}
    assert report.is_draining


def test_prompts_are_reported_by_when_they_are_due():
    due = [DuePrefills(2.5, 4.0, 3, 70, 900.0), DuePrefills(math.inf, math.inf, 1, 9, 40.5)]
    reported = wire_conversion.load_report(core_messages.SchedulerLoad(due=due)).due
    names = DuePrefills._fields
    assert [tuple(getattr(item, name) for name in names) for item in reported] == [tuple(item) for item in due]


def test_what_is_under_way_is_reported_and_so_is_that_nothing_is():
    values = {name: number for number, name in enumerate(core_messages.IterationReport.__struct_fields__, 1)}
    load = core_messages.SchedulerLoad(under_way=core_messages.IterationReport(**values))
    under_way = wire_conversion.load_report(load).under_way
    assert {name: getattr(under_way, name) for name in values} == values
    idle = wire_conversion.load_report(core_messages.SchedulerLoad())
    assert idle.HasField("under_way")
    assert idle.under_way == wire.Iteration()


def test_an_iteration_is_reported_whole():
    values = {name: number for number, name in enumerate(core_messages.IterationReport.__struct_fields__, 1)}
    message = wire_conversion.iteration_message(core_messages.IterationReport(**values))
    assert {name: getattr(message, name) for name in values} == values


def test_a_part_of_a_plan_is_checked_by_its_strategys_row():
    message = wire.Configure(
        role=plan_pb2.ROLE_PREFILL_HEAVY, chunk_size_tokens=99, strategy="taichi", is_draining=True
    )
    command = wire_conversion.configure_command(message, 4, is_leaving=False)
    assert command == core_messages.ConfigureCommand(
        generation=4, role="P-heavy", chunk_size_tokens=99, is_draining=True, strategy="taichi"
    )
    message.strategy_parameters["watermark_percent"] = "90"
    message.chunk_sizes_tokens.extend((99, 512))
    command = wire_conversion.configure_command(message, 5, is_leaving=False)
    assert (command.parameters, command.chunk_sizes_tokens) == ({"watermark_percent": "90"}, [99, 512])
    message.strategy_parameters["watermark_percent"] = "100"
    with pytest.raises(ValueError, match=r"parameters.watermark_percent is 100, allowed are 50 to 99"):
        wire_conversion.configure_command(message, 6, is_leaving=False)


def test_extras_carry_what_vllms_request_has_no_place_for():
    submit = wire.Submit(
        submit_number=3,
        output_token_ids=[4, 5],
        ttft_slo_s=1.0,
        tpot_slo_s=0.1,
        age_s=0.5,
        since_first_token_s=0.25,
        output_tokens_since_reset=1,
        is_recovery=True,
        kv=wire.KvHandle(fingerprint="f", transfer_params_json="{}"),
    )
    extras = wire_conversion.request_extras(submit, stream_number=9, grant_key="9.1", fingerprint="f", now_s=100.0)
    assert extras == core_messages.RequestExtras(
        stream_number=9,
        submit_number=3,
        output_token_ids=[4, 5],
        transfer_params="{}",
        grant_key="9.1",
        ttft_slo_s=1.0,
        tpot_slo_s=0.1,
        arrival_s=99.5,
        first_token_s=99.75,
        output_tokens_since_reset=1,
        is_recovery=True,
    )
    submit.ClearField("since_first_token_s")
    extras = wire_conversion.request_extras(submit, stream_number=9, grant_key="", fingerprint="f", now_s=100.0)
    assert extras.first_token_s is None


# --- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_side():
    """The modules that import vLLM, whose warnings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sluice_engine.server import request_builder  # noqa: PLC0415
        from sluice_engine.startup import identity, launch, vllm_config  # noqa: PLC0415
    return SimpleNamespace(identity=identity, launch=launch, request_builder=request_builder, vllm_config=vllm_config)


@pytest.fixture(scope="module")
def builder(vllm_side, tiny_model: Path) -> VllmRequestBuilder:
    settings = EngineSettings(
        engine_id="e",
        port=1,
        metrics_port=2,
        kv_host="127.0.0.1",
        kv_port=3,
        model=str(tiny_model),
        max_batch_tokens=512,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = vllm_side.vllm_config.make_vllm_config(settings, 1)
        tokenizer = vllm_side.launch.load_tokenizer(config)
    return vllm_side.request_builder.VllmRequestBuilder(config, tokenizer)


def build(builder: VllmRequestBuilder, **fields):
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 8, **fields})
    submit = wire.Submit(prompt_token_ids=[50, 51], priority=3, sampling=sampling)
    return builder.build("core-id", submit, core_messages.RequestExtras(submit_number=5))


def test_a_plain_request_has_vllms_defaults(builder):
    request = build(builder)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("core-id", [50, 51], 3)
    parameters = request.sampling_params
    assert (parameters.max_tokens, parameters.temperature, parameters.top_k, parameters.top_p) == (8, 1.0, 0, 1.0)
    assert (parameters.logprobs, parameters.seed, parameters.structured_outputs) == (None, None, None)
    assert parameters.detokenize is False
    assert core_encoding.decode_extras(parameters.extra_args).submit_number == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 3),
        ("temperature", 0.5),
        ("top_p", 0.25),
        ("top_k", 7),
        ("min_p", 0.125),
        ("presence_penalty", -1.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.25),
        ("seed", 2**40),
        ("stop_token_ids", [60, 61]),
        ("ignore_eos", True),
        ("logit_bias", {70: 2.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_parameter_arrives_as_it_was_sent(builder, name, value):
    assert getattr(build(builder, **{name: value}).sampling_params, name) == value


def test_every_sampling_field_has_a_name_in_vllm(vllm_side):
    """A field that is new in the proto reaches vLLM without another line, if vLLM knows its name."""
    ours = {"num_logprobs": "logprobs", "structured_output": "structured_outputs"}
    names = {ours.get(field.name, field.name) for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names <= set(vllm_side.request_builder.SamplingParams.__struct_fields__)


def test_every_constraint_has_a_name_in_vllm(vllm_side):
    fields = dataclasses.fields(vllm_side.request_builder.StructuredOutputsParams)
    assert constraint_names().keys() <= {field.name for field in fields}


def test_zero_is_a_value_where_absence_is_not(builder):
    assert build(builder, temperature=0.0).sampling_params.temperature == 0.0
    assert build(builder, seed=0).sampling_params.seed == 0
    assert build(builder, num_logprobs=0).sampling_params.logprobs == 0


def test_eos_ends_a_request_unless_it_is_ignored(builder):
    eos = builder._eos_token_id
    assert build(builder).sampling_params.eos_token_id == eos
    ignoring = build(builder, ignore_eos=True, min_tokens=2).sampling_params
    assert ignoring.eos_token_id is None
    assert eos in ignoring.all_stop_token_ids  # min_tokens suppresses it all the same


def test_bad_words_become_tokens(builder):
    assert build(builder, bad_words=["while"]).sampling_params.bad_words_token_ids


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        ({"json_schema": '{"type":"object"}'}, "json", '{"type":"object"}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"choices": sampling_pb2.StructuredOutput.Choices(values=["a", "b"])}, "choice", ["a", "b"]),
        ({"json_object": True}, "json_object", True),
    ],
    ids=["schema", "regex", "grammar", "choices", "object"],
)
def test_a_constraint_arrives_with_its_backend_chosen(builder, constraint, field, value):
    message = sampling_pb2.StructuredOutput(**constraint)
    outputs = build(builder, structured_output=message).sampling_params.structured_outputs
    assert getattr(outputs, field) == value
    assert outputs._backend == "guidance"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed: -1 means none"),
        ({"num_logprobs": 10_000}, "logprobs"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"structured_output": sampling_pb2.StructuredOutput(regex="(")}, "sampling"),
        ({"structured_output": sampling_pb2.StructuredOutput(json_object=False)}, "json_object"),
        ({"structured_output": sampling_pb2.StructuredOutput(choices={})}, "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_out_of_range_is_refused_by_name(builder, fields, named):
    with pytest.raises(SubmitRefusedError, match=named):
        build(builder, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids: empty"),
        ({"prompt_token_ids": [1] * 4096}, "prompt_token_ids: 4096 prompt and 0 output tokens .* 4096 in all"),
        (
            {"prompt_token_ids": [1] * 4090, "output_token_ids": [1] * 6},
            "prompt_token_ids: 4090 prompt and 6 output",
        ),
        ({"prompt_token_ids": [2048]}, "prompt_token_ids: token 2048 is outside the vocabulary of 2048"),
        ({"prompt_token_ids": [1], "output_token_ids": [10**6]}, "output_token_ids: token 1000000"),
        ({"prompt_token_ids": [1], "output_token_ids": [1] * 8}, "sampling.max_tokens: 8, but 8 are generated"),
    ],
    ids=["empty", "too long", "too long with output", "prompt token", "output token", "nothing left"],
)
def test_tokens_that_cannot_run_are_refused_with_the_limit(builder, fields, named):
    submit = wire.Submit(sampling=sampling_pb2.SamplingParams(max_tokens=8), **fields)
    with pytest.raises(SubmitRefusedError, match=f"^{named}"):
        builder.build("id", submit, core_messages.RequestExtras(output_token_ids=list(submit.output_token_ids)))


def test_tokens_at_the_limits_run(builder):
    submit = wire.Submit(
        sampling=sampling_pb2.SamplingParams(max_tokens=6),
        prompt_token_ids=[2047] * 4090,
        output_token_ids=[2047] * 5,
    )
    request = builder.build("id", submit, core_messages.RequestExtras(output_token_ids=[2047] * 5))
    assert request.prompt_token_ids == [2047] * 4090


def test_the_first_part_of_a_prompt_is_its_first_tokens_and_a_token_that_nobody_sees(builder):
    sampling = sampling_pb2.SamplingParams(max_tokens=6, temperature=0.7, seed=3, num_logprobs=2, stop_token_ids=[5])
    submit = wire.Submit(sampling=sampling, prompt_token_ids=range(1, 101), split_prompt_tokens=37)
    extras = core_messages.RequestExtras(is_first_part=True)
    request = builder.build("id", submit, extras)
    assert request.prompt_token_ids == list(range(1, 38))
    parameters = request.sampling_params
    assert (parameters.max_tokens, parameters.temperature, parameters.logprobs) == (1, 0.0, None)
    assert (parameters.ignore_eos, parameters.stop_token_ids, parameters.seed) == (True, [], None)
    assert parameters.extra_args == extras.encode()


@pytest.mark.parametrize(
    ("split", "output", "caches", "named"),
    [
        (100, [], True, "split_prompt_tokens: 100 of 100"),
        (101, [], True, "split_prompt_tokens: 101 of 100"),
        (50, [7], True, "split_prompt_tokens: 50 of 100 prompt tokens, after 1"),
        (50, [], False, "split_prompt_tokens: this engine computes no parts of prompts"),
    ],
)
def test_a_first_part_that_is_none_or_that_the_engine_cannot_compute_is_refused(
    builder, split, output, caches, named, monkeypatch
):
    monkeypatch.setattr(builder._config.cache_config, "enable_prefix_caching", caches)
    submit = wire.Submit(
        sampling=sampling_pb2.SamplingParams(max_tokens=6),
        prompt_token_ids=[1] * 100,
        output_token_ids=output,
        split_prompt_tokens=split,
    )
    with pytest.raises(SubmitRefusedError, match=f"^{named}"):
        builder.build("id", submit, core_messages.RequestExtras(output_token_ids=output))


def test_without_a_tokenizer_what_needs_one_is_refused(builder):
    bare = type(builder)(builder._config, None)
    assert build(bare).sampling_params.eos_token_id == builder._eos_token_id
    for fields in ({"bad_words": ["a"]}, {"structured_output": sampling_pb2.StructuredOutput(regex="a")}):
        with pytest.raises(SubmitRefusedError, match="tokenizer"):
            build(bare, **fields)


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_fingerprint_follows_the_weights_and_not_their_place(vllm_side, tiny_model, tmp_path):
    hash_model = vllm_side.identity.hash_model
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in tiny_model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    original = hash_model(str(tiny_model), None)
    assert hash_model(str(copy), None) == original
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert hash_model(str(copy), None) != original


def test_a_fingerprint_is_readable(vllm_side, builder):
    settings = SimpleNamespace(model=str(builder._model.model), revision=None, emulation=None)
    parts = vllm_side.identity.make_fingerprint(settings, builder._config).split("/")
    assert parts[0] == "LlamaForCausalLM"
    assert parts[2:4] == ["float32", "kv-auto"]
    assert {"block32", "tp1", "grammar-guidance", "vllm-0.32.0"} < set(parts)


@pytest.mark.parametrize(
    ("changes", "hosted", "is_same"),
    [
        ({}, {}, True),
        ({"revision": "main"}, {}, True),
        ({"revision": "v2"}, {}, False),
        ({"model": "org/other"}, {}, False),
        ({"emulation": "a clock"}, {}, False),
        ({}, {"dtype": "torch.float16"}, False),
        ({}, {"cache_dtype": "fp8"}, False),
        ({}, {"block_size": 64}, False),
        ({}, {"tensor_parallel_size": 2}, False),
        ({}, {"backend": "xgrammar"}, False),
    ],
    ids=str,
)
def test_whatever_changes_the_bytes_of_kv_changes_the_fingerprint(vllm_side, monkeypatch, changes, hosted, is_same):
    monkeypatch.setattr(vllm_side.identity, "find_layout", lambda _: "hnd")
    plain = {"model": "org/model", "revision": None, "emulation": None}

    def make(settings: dict[str, Any], **of_vllm: Any) -> str:
        values = {"dtype": "torch.float32", "cache_dtype": "auto", "block_size": 32, "tensor_parallel_size": 1}
        values |= {"backend": "guidance", "architecture": "Llama", **of_vllm}
        part = SimpleNamespace(**values)
        names = ("model_config", "cache_config", "parallel_config", "structured_outputs_config")
        config = SimpleNamespace(**dict.fromkeys(names, part))
        return vllm_side.identity.make_fingerprint(SimpleNamespace(**settings), config)

    assert (make(plain | changes, **hosted) == make(plain)) is is_same


def test_a_router_learns_from_the_hello_what_it_decides_by(vllm_side, builder, monkeypatch):
    settings = EngineSettings(
        engine_id="pod-uid",
        port=1,
        metrics_port=2,
        kv_host="127.0.0.1",
        kv_port=3,
        model=str(builder._model.model),
        max_batch_tokens=512,
        model_id="tiny-7",
    )
    identity = vllm_side.identity
    hello = identity.make_hello(settings, builder._config, 77)
    assert (hello.engine_id, hello.epoch, hello.model_id) == ("pod-uid", 77, "tiny-7")
    assert hello.model == f"LlamaForCausalLM/{identity.hash_model(settings.model, None)}"
    assert hello.fingerprint == identity.make_fingerprint(settings, builder._config)
    assert (hello.max_batch_tokens, hello.max_num_seqs, hello.max_model_len_tokens) == (512, 256, 4096)
    # Keys and values of two heads of 32 numbers of 4 bytes, in two layers.
    assert (hello.block_size_tokens, hello.kv_bytes_per_token) == (32, 2 * 2 * 32 * 4 * 2)
    assert hello.version == "vllm 0.32.0"
    assert len(hello.prefix_root) == 32
    assert (hello.pulls_parts, hello.cuts_prompts) == (True, True)
    monkeypatch.setattr(builder._config.cache_config, "enable_prefix_caching", False)
    hello = identity.make_hello(settings, builder._config, 77)
    assert (hello.pulls_parts, hello.cuts_prompts) == (False, False)


@pytest.mark.parametrize(
    ("cache_dtype", "is_latent", "emulation", "num_bytes"),
    [
        ("auto", False, None, 2 * 8 * 128 * 4 * 48),
        ("fp8_e4m3", False, None, 2 * 8 * 128 * 1 * 48),
        ("auto", True, None, 128 * 4 * 48),
        ("auto", False, EmulationSettings(kv_bytes_per_token=9), 9),
        ("auto", False, EmulationSettings(base_s=0.01), 2 * 8 * 128 * 4 * 48),
    ],
    ids=["32 bits", "8 bits", "one latent for both", "as the emulated link charges", "emulated, and not said"],
)
def test_a_tokens_kv_is_as_large_as_the_cache_makes_it(
    vllm_side, builder, cache_dtype, is_latent, emulation, num_bytes
):
    model = SimpleNamespace(
        dtype=builder._model.dtype,
        use_mla=is_latent,
        get_total_num_kv_heads=lambda: 8,
        get_total_num_hidden_layers=lambda: 48,
        get_head_size=lambda: 128,
    )
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype=cache_dtype))
    count = vllm_side.identity.count_kv_bytes_per_token(SimpleNamespace(emulation=emulation), config)
    assert count == num_bytes


def test_what_came_later_to_the_router_is_later_to_vllm_and_salts_its_own_cache(builder, vllm_side, monkeypatch):
    monkeypatch.setattr(vllm_side.request_builder.time, "time", lambda: 1000.0)
    submit = wire.Submit(prompt_token_ids=[5], age_s=2.5, sampling=sampling_pb2.SamplingParams(max_tokens=1))
    request = builder.build("id", submit, core_messages.RequestExtras())
    assert (request.arrival_time, request.cache_salt) == (997.5, None)
    submit.cache_salt = "alice"
    assert builder.build("id", submit, core_messages.RequestExtras()).cache_salt == "alice"


def test_no_two_starts_have_one_epoch(vllm_side, monkeypatch):
    epochs = [vllm_side.identity.make_epoch() for _ in range(100)]
    monkeypatch.setattr(vllm_side.identity.time, "time_ns", lambda: 1_795_000_000_123_999_999)
    assert vllm_side.identity.make_epoch() >> 20 == 1_795_000_000_123
    assert len(set(epochs)) == 100
    assert all(0 < epoch < 2**64 for epoch in epochs)


@pytest.mark.parametrize("given", [{}, {"OMP_NUM_THREADS": "4", "VLLM_NO_USAGE_STATS": "0", "UCX_NET_DEVICES": "eth0"}])
def test_engines_report_nothing_home_and_share_cores_unless_the_user_says_otherwise(vllm_side, monkeypatch, given):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "40", **given}
    monkeypatch.setattr(vllm_side.vllm_config.os, "environ", environment)
    settings = EngineSettings(
        engine_id="e",
        port=1,
        metrics_port=2,
        kv_host="127.0.0.1",
        kv_port=3,
        model="org/model",
        max_batch_tokens=512,
        start_timeout_s=90.0,
        emulation={"gpu": "a100-80g"},
    )
    vllm_side.vllm_config.set_environment(settings)
    assert environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "3",
        "VLLM_ENGINE_READY_TIMEOUT_S": "90",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TCP_USER_TIMEOUT": vllm_side.vllm_config.PEER_TIMEOUT,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "UCX_NET_DEVICES": "lo",
        **given,
    }


@pytest.mark.parametrize(
    ("of_config", "of_tokenizer", "expected"),
    [(None, None, None), (2, None, 2), ([2, 7], None, 2), ([], None, None), (2, SimpleNamespace(eos_token_id=9), 9)],
    ids=["none", "one", "several", "an empty list", "the tokenizer's"],
)
def test_the_token_that_ends_an_output_is_the_tokenizers_or_the_configs_first(
    vllm_side, of_config, of_tokenizer, expected
):
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(eos_token_id=of_config)))
    assert vllm_side.request_builder.find_eos_token_id(config, of_tokenizer) == expected
