"""What a manifest renders to: the commands of its containers and its plan, whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from sluice_core.records import EngineId, Role
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.model_identity import identify_model
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.resources.command_lines import (
    EngineSite,
    RouterSite,
    render_engine_command,
    render_engine_environment,
    render_router_command,
)

CONTENT: dict[str, Any] = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "ServingCluster",
    "metadata": {"name": "test"},
    "spec": {
        "replicas": 3,
        "prefillHeavy": 1,
        "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
        "strategy": "TaiChi",
        "slo": {
            "ttftMilliseconds": 500,
            "tpotMilliseconds": 50,
            "classes": [{"name": "batch", "ttftMilliseconds": 9000, "tpotMilliseconds": 900, "priority": -5}],
        },
        "model": {"name": "m", "servedName": "served", "source": {"huggingFace": {}}},
        "router": {"replicas": 2},
    },
}
SITE = EngineSite(
    engine_id=EngineId("e"),
    host="1.2.3.4",
    port=1,
    metrics_port=2,
    kv_host="5.6.7.8",
    kv_port=3,
    model_directory="/model",
)


def make(**engine: Any) -> Any:
    content = copy.deepcopy(CONTENT)
    content["spec"]["engine"] = engine
    return check_manifest(content)


def test_the_engine_command_names_what_is_set_and_nothing_else() -> None:
    assert " ".join(render_engine_command(make().spec, SITE)) == (
        "python -m sluice_engine --engine-id e --host 1.2.3.4 --port 1 --metrics-port 2 --kv-host 5.6.7.8 --kv-port 3"
        " --model /model --max-batch-tokens 8192 --tensor-parallel-size 1 --drain-timeout-s 300 --start-timeout-s 1800"
        " --resume-timeout-s 30"
    )


def test_further_arguments_go_to_the_program_that_owns_them() -> None:
    cluster = make(
        maxModelLen=4096,
        extraArgs=[
            "--dtype=half",
            "--max_num_seqs",
            "7",
            "--kv-cache-memory-bytes=9",
            "--seed",
            "3",
            "--enforce-eager",
        ],
        emulation={"gpu": "h100", "model": "Qwen2.5-14B"},
    )
    command = render_engine_command(cluster.spec, SITE)
    own, passed_on = command[: command.index("--")], command[command.index("--") + 1 :]
    assert passed_on == ["--seed", "3", "--enforce-eager"]
    assert own[own.index("--max-model-len") :] == [
        *("--max-model-len", "4096", "--tensor-parallel-size", "1", "--drain-timeout-s", "300"),
        *("--start-timeout-s", "1800", "--resume-timeout-s", "30"),
        *("--emulation", '{"gpu": "h100", "model": "Qwen2.5-14B"}'),
        *("--dtype", "half", "--max-num-seqs", "7", "--kv-cache-bytes", "9"),
    ]


def test_the_environment_holds_the_network_and_the_users_own() -> None:
    content = copy.deepcopy(CONTENT)
    content["spec"]["network"] = {
        "mode": "RDMA",
        "tcpPortRange": "7000-7099",
        "rdma": {
            "fabric": "RoCE",
            "resourceName": "a/b",
            "gidIndex": 3,
            "netDevices": ["mlx5_0:1"],
            "transports": ["rc"],
        },
    }
    content["spec"]["engine"] = {"env": [{"name": "A", "value": "1"}]}
    assert render_engine_environment(check_manifest(content).spec) == {
        "UCX_TCP_PORT_RANGE": "7000-7099",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "UCX_TLS": "rc",
        "UCX_IB_GID_INDEX": "3",
        "A": "1",
    }


@pytest.mark.parametrize(
    ("rdma", "options"),
    [
        ({"fabric": "InfiniBand"}, []),
        ({"fabric": "RoCE", "requireRDMA": True}, ["--require-rdma", "true"]),
        ({"fabric": "EFA", "requireRDMA": True}, ["--kv-backend", "LIBFABRIC", "--require-rdma", "true"]),
    ],
    ids=["InfiniBand", "RoCE, required", "EFA, required"],
)
def test_the_engine_command_names_the_kv_backend_and_whether_rdma_is_required(rdma, options) -> None:
    content = copy.deepcopy(CONTENT)
    content["spec"]["network"] = {"mode": "RDMA", "rdma": {"resourceName": "a/b", **rdma}}
    command = render_engine_command(check_manifest(content).spec, SITE)
    given = [
        part
        for name in ("--kv-backend", "--require-rdma")
        if name in command
        for part in (name, command[command.index(name) + 1])
    ]
    assert given == options


def test_the_router_command() -> None:
    site = RouterSite(
        host="h", http_port=1, grpc_port=2, control_port=3, metrics_port=4, model_directory="/m", engines="dns:x:8010"
    )
    command = "python -m sluice_router --host h --http-port 1 --grpc-port 2 --control-port 3 --metrics-port 4"
    command += " --model /m --engines dns:x:8010 --grace-s 300"
    assert " ".join(render_router_command(make().spec, site)) == command
    content = copy.deepcopy(CONTENT)
    content["spec"]["router"]["cors"] = {"allowedOrigins": ["https://a", "http://b:3000"]}
    jwt = {"keySetUrl": "https://i/keys", "issuer": "https://i", "audience": "llm"}
    content["spec"]["router"]["auth"] = {"mode": "JWT", "jwt": jwt}
    with_pages = render_router_command(check_manifest(content).spec, site)
    assert with_pages[with_pages.index("--allowed-origins") + 1] == "https://a,http://b:3000"
    assert " ".join(with_pages).endswith(
        "--jwt-keys https://i/keys --jwt-issuer https://i --jwt-audience llm --jwt-owner-claim sub --jwt-leeway-s 30"
    )
    emulated = make(emulation={"gpu": "a100-80gx2", "model": "qwen2.5-32b"}).spec
    assert " ".join(render_router_command(emulated, site)) == f"{command} --latency-profile qwen2.5-32b@a100-80gx2"


def test_the_plan_has_the_limits_of_owners() -> None:
    limits = [{"owner": "a", "requestsPerMinute": 5, "classes": ["", "batch"]}, {"owner": "*", "weight": 2}]
    auth = {"mode": "APIKey", "apiKey": {"secretName": "k"}, "limits": limits}
    content = copy.deepcopy(CONTENT)
    content["spec"]["router"] = {"auth": auth}
    plan = render_plan(check_manifest(content), {}, generation=7, cluster_uid="u")
    assert [MessageToDict(one, preserving_proto_field_name=True) for one in plan.owner_limits] == [
        {"owner": "a", "requests_per_minute": 5, "classes": ["", "batch"], "weight": 1},
        {"owner": "*", "weight": 2},
    ]


def test_the_plan() -> None:
    roles = {EngineId("a"): Role.PREFILL_HEAVY, EngineId("b"): Role.DECODE_HEAVY}
    plan = render_plan(make(), roles, generation=7, cluster_uid="u", draining={EngineId("b")})
    assert MessageToDict(plan, preserving_proto_field_name=True) == {
        "cluster_uid": "u",
        "generation": "7",
        "strategy": "taichi",
        "strategy_parameters": {
            "watermark_percent": "95",
            "approaching_factor_percent": "96",
            "early_rejection": "Off",
            "min_tokens_between_moves": "16",
        },
        "slo_classes": [
            {"ttft_milliseconds": 500, "tpot_milliseconds": 50},
            {"name": "batch", "ttft_milliseconds": 9000, "tpot_milliseconds": 900, "priority": -5},
        ],
        "attainment_percent": 90,
        "engines": [
            {"engine_id": "a", "role": "ROLE_PREFILL_HEAVY", "chunk_size_tokens": 512},
            {"engine_id": "b", "role": "ROLE_DECODE_HEAVY", "chunk_size_tokens": 64, "is_draining": True},
        ],
        "unnamed_chunk_size_tokens": 64,
        "served_model_name": "served",
        "served_models": [{"model_id": identify_model(make().spec.model), "served_name": "served"}],
        "num_routers": 2,
    }
