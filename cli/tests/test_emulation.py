"""What a manifest emulates is one thing to engines, routers and the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sluice_cli.simulation.cluster_builder import build_cluster
from sluice_cli.simulation.cluster_spec import read_manifest_spec
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId
from sluice_engine.emulation.emulated_gpu_profile import find_gpu
from sluice_engine.settings import EmulationSettings
from sluice_operator.api.manifest import check_manifest
from sluice_operator.resources.command_lines import EngineSite, RouterSite, render_engine_command, render_router_command
from sluice_router.settings import load_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE = EngineSite(
    engine_id=EngineId("e"), host="h", port=1, metrics_port=2, kv_host="h", kv_port=3, model_directory="/m"
)
ROUTER = RouterSite(
    host="h", http_port=1, grpc_port=2, control_port=3, metrics_port=4, model_directory="/m", engines="dns:x:8010"
)


def find_option(command: Sequence[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("model", "gpu", "name", "num_gpus"),
    [("Qwen2.5-14B", "a100", "a100-80g", 1), ("qwen2.5-32b", "a100-80gx2", "a100-80g", 2)],
    ids=["short names", "two GPUs per engine"],
)
def test_engines_routers_and_the_simulator_take_one_profile(model: str, gpu: str, name: str, num_gpus: int) -> None:
    content: dict[str, Any] = {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "ServingCluster",
        "metadata": {"name": "test"},
        "spec": {
            "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
            "model": {"name": "m", "source": {"huggingFace": {}}},
            "engine": {"emulation": {"model": model, "gpu": gpu}},
        },
    }
    cluster = check_manifest(content)
    wanted = load_model_on_gpu(model, name, num_gpus)
    emulation = find_option(render_engine_command(cluster.spec, ENGINE), "--emulation")
    emulated = find_gpu(EmulationSettings.model_validate_json(emulation))
    assert (emulated.profile, emulated.kv_tokens) == (wanted.profile, wanted.kv_capacity_tokens)
    assert load_profile(find_option(render_router_command(cluster.spec, ROUTER), "--latency-profile")) == wanted.profile
    engine = build_cluster(read_manifest_spec(cluster, None, None), 0).engines[0]
    assert engine.profile == wanted.profile
    assert engine.kv_blocks_total == emulated.kv_tokens // engine.block_size_tokens
