"""The command line, and what is refused before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sluice_engine.errors import SettingsError, UnsupportedVllmError
from sluice_engine.resume_timeouts import RESUME_TIMEOUT_S
from sluice_engine.settings import OPTIONS, EngineSettings, parse_settings
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


@pytest.mark.parametrize(
    "argument", ["--scheduler-cls=x", "--kv_transfer_config={}", "--max-num-batched-tokens", "--kv-events-config={}"]
)
def test_vllm_arguments_that_are_ours_are_refused(argument):
    with pytest.raises(SettingsError, match="is set by the engine itself"):
        parse_settings([*command_line(), "--", argument], {})


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
