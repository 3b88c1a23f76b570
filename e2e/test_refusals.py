"""A model that engines refuse: said once and in one line, shown by ``sluice status``, and not tried again."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cluster import SLUICE, run_cluster
from psutil import process_iter

from sluice_cli.local_cluster.cluster_directory import ClusterDirectory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

PORTS = "24600-24648"
HTTP_PORT = 24649
# A Mamba of two layers. It has no attention at all, which its config.json tells.
MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 32,
    "state_size": 16,
    "n_groups": 1,
    "chunk_size": 32,
    "vocab_size": 2048,
    "torch_dtype": "float32",
}
# A user who says to know better: config.json is not judged then, and the refusal is vLLM's.
OVERRIDE = {"extraArgs": ["--hf-overrides={}"]}
BY_CONFIG = "state_size is 16, so it has state-space layers; models with full attention in every layer are supported"
BY_VLLM = "the model (Mamba2ForCausalLM) has no attention; models with full attention in every layer are supported"
# Longer than the wait before a program that ended is started again.
RETRY_S = 2.0


@pytest.fixture
def mambas(tmp_path: Path, models: Path) -> Path:
    """A folder of models, with a Mamba that has the tiny model's tokenizer and no weights."""
    folder = tmp_path / "models"
    shutil.copytree(models / "tiny", folder / "mamba", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "mamba" / "config.json").write_text(json.dumps(MAMBA))
    return folder


def make_manifest(example: dict[str, Any], **engine: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "refused"
    spec = manifest["spec"]
    spec.update(replicas=1, prefillHeavy=0)
    spec["model"]["source"]["persistentVolumeClaim"]["path"] = "mamba"
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    spec["engine"].update(engine)
    return manifest


def test_an_engine_that_vllm_refuses_says_why_once_and_waits(
    tmp_path: Path, example: dict[str, Any], mambas: Path
) -> None:
    with run_cluster(tmp_path / "up", make_manifest(example, **OVERRIDE), models=mambas, ports=PORTS) as cluster:
        status = cluster.wait(
            "the engine is refused", lambda found: [engine["state"] for engine in found["engines"]] == ["refused"]
        )
        assert status["engines"][0]["last_fault"] == BY_VLLM
        time.sleep(RETRY_S)
        assert cluster.processes("engine")["engine-0"]["num_starts"] == 1
        (line,) = (line for line in cluster.log.read_text().splitlines() if BY_VLLM[:40] in line)
        assert f"engine-0 refuses to start: {BY_VLLM}; it is tried again when the manifest changes it" in line
        shown = subprocess.run([*SLUICE, "status"], cwd=cluster.directory, capture_output=True, text=True, check=True)
        assert f"engine-0: {BY_VLLM}" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("engine", "reason"),
    [({}, BY_CONFIG), (OVERRIDE, f"engine-0: {BY_VLLM}")],
    ids=["by config.json, before an engine starts", "by vLLM"],
)
def test_a_cluster_in_the_background_ends_with_the_reason_in_its_last_line(
    tmp_path: Path, example: dict[str, Any], mambas: Path, engine: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(make_manifest(example, **engine)))
    command = [*SLUICE, "up", "-d", str(path), "--volume", f"models={mambas}", "--port-range", PORTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 1
    assert said[-1].endswith(reason)
    assert not ClusterDirectory("refused", tmp_path / ".sluice").is_running()
    assert not any(str(tmp_path) in " ".join(process.info["cmdline"] or ()) for process in process_iter(["cmdline"]))
