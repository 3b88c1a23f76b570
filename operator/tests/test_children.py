"""The children: pure functions of the manifest, and what Kubernetes' own types say of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from children_harness import check, engine_template, render, router_template
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.client import models

from sluice_operator.api.labels import RESTART_HASH_ANNOTATION
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.resources.apply import is_applied
from sluice_operator.resources.children import RenderInputs, render_children
from sluice_operator.resources.deployments.engine_deployment import render_engines
from sluice_operator.resources.pods.model_volume import FETCH_PROGRAM
from sluice_operator.resources.pods.router_pod import CPU_REQUEST
from sluice_operator.settings import OperatorSettings

TYPES = {
    "Deployment": models.V1Deployment,
    "Service": models.V1Service,
    "ServiceAccount": models.V1ServiceAccount,
    "PodDisruptionBudget": models.V1PodDisruptionBudget,
    "NetworkPolicy": models.V1NetworkPolicy,
}


# A revision that never moves.
COMMIT = "0123456789abcdef" * 2 + "01234567"


RDMA = {
    "mode": "RDMA",
    "rdma": {
        "fabric": "RoCE",
        "resourceName": "rdma/hca",
        "resourceCount": 2,
        "networks": ["roce-a", "other/roce-b"],
        "gidIndex": 3,
        "memlock": "IPCLock",
        "requireRDMA": True,
        "podAnnotations": {"x/y": "z"},
    },
}


PLACED: dict[str, Any] = {
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    "imagePullSecrets": ["registry"],
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "nodeSelector": {"a": "b"},
    "affinity": {"nodeAffinity": {}},
    "podTemplate": {
        "metadata": {"annotations": {"team": "serving"}},
        "spec": {"priorityClassName": "high", "containers": [{"name": "side", "image": "side:1"}]},
    },
}


@pytest.mark.parametrize("template", [engine_template, router_template], ids=["engine", "router"])
def test_pods_are_as_users_say(template) -> None:
    plain, rendered = template(), template(engine=PLACED, router=PLACED)
    spec = rendered["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert (spec["nodeSelector"], spec["affinity"]) == ({"a": "b"}, {"nodeAffinity": {}})
    own, side = spec["containers"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy"} in own["env"]
    assert (side["image"], spec["priorityClassName"]) == ("side:1", "high")
    assert rendered["metadata"]["annotations"]["team"] == "serving"
    # It replaces pods, as every field of theirs.
    digest = RESTART_HASH_ANNOTATION
    assert rendered["metadata"]["annotations"][digest] != plain["metadata"]["annotations"][digest]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"network": RDMA},
        {"network": {"mode": "TCP", "tcpPortRange": "7000-7099"}},
        {"model": {"name": "a/b", "source": {"huggingFace": {"tokenSecretRef": {"name": "t", "key": "k"}}}}},
        {"model": {"name": "m", "source": {"huggingFace": {"caBundle": {"secretKeyRef": {"name": "t", "key": "k"}}}}}},
        {"model": {"name": "m", "source": {"image": {"reference": "models/x:1", "path": "a/b"}}}},
        {"engine": {"sharedMemory": "2Gi", "resources": {"limits": {"memory": "8Gi", "cpu": 2, "nvidia.com/gpu": 1}}}},
        {"engine": PLACED, "router": PLACED},
        {
            "router": {
                "replicas": 1,
                "auth": {"mode": "APIKey", "apiKey": {"secretName": "keys"}},
                "tls": {"mode": "SecretRef", "secretName": "front"},
            },
            "network": {"tls": {"mode": "SecretRef", "secretName": "peers"}},
        },
    ],
    ids=["tcp", "rdma", "ports", "hugging-face", "authorities", "image", "resources", "placement", "secured"],
)
def test_the_clients_own_types_know_every_field(spec) -> None:
    for (kind, _), child in render(**spec).items():
        # Round trip: a field that the type does not know, or of another type, would be lost or refused.
        parsed = TYPES[kind].model_validate(child).model_dump(mode="json", by_alias=True, exclude_none=True)
        assert is_applied(child, parsed), kind


def test_engines_run_the_very_command_of_sluice_up_with_what_the_kubelet_fills_in() -> None:
    container = engine_template()["spec"]["containers"][0]
    assert " ".join(container["command"]) == (
        "python -m sluice_engine --engine-id $(SLUICE_ENGINE_ID) --host 0.0.0.0 --port 8010 --metrics-port 9090"
        " --kv-host $(SLUICE_KV_HOST) --kv-port 5600 --model /model --max-batch-tokens 2048 --tensor-parallel-size 1"
        " --drain-timeout-s 30 --start-timeout-s 1800 --resume-timeout-s 30"
    )
    variables = {item["name"]: item.get("valueFrom", item.get("value")) for item in container["env"]}
    assert variables["SLUICE_ENGINE_ID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert variables["SLUICE_KV_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_routers_run_the_very_command_of_sluice_up() -> None:
    container = router_template()["spec"]["containers"][0]
    assert " ".join(container["command"]) == (
        "python -m sluice_router --host 0.0.0.0 --http-port 8000 --grpc-port 8001 --control-port 8002"
        " --metrics-port 9090 --model /model --engines dns:tiny-engines:8010 --plan /etc/sluice/plan/plan.json"
        " --grace-s 300"
    )


@pytest.mark.parametrize("template", [engine_template, router_template], ids=["engine", "router"])
def test_pods_are_restricted_and_have_no_token(template) -> None:
    spec = template()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert "hostPath" not in json.dumps(spec)


def test_an_engine_has_time_to_start_and_to_drain() -> None:
    template = engine_template(
        engine={"startupTimeoutSeconds": 301, "drainTimeoutSeconds": 77}, router={"drainTimeoutSeconds": 76}
    )
    container = template["spec"]["containers"][0]
    probe = container["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 301
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # The API server refuses a sleep that fills the grace period.
    assert template["spec"]["terminationGracePeriodSeconds"] == pre_stop + 77 + 15


def test_engines_and_routers_that_end_at_once_have_the_same_time() -> None:
    """A cluster that is deleted ends all its pods at once: engines must outlast the streams that routers allow."""
    sections = {"engine": {"drainTimeoutSeconds": 30}, "router": {"drainTimeoutSeconds": 300}}
    engine, router = engine_template(**sections), router_template(**sections)
    grace_s = [template["spec"]["terminationGracePeriodSeconds"] for template in (engine, router)]
    assert grace_s[0] >= grace_s[1] > 300
    command = engine["spec"]["containers"][0]["command"]
    # Where its routers stay, an engine still leaves in its own time.
    assert command[command.index("--drain-timeout-s") + 1] == "30"


def test_a_router_has_time_to_end_its_answers() -> None:
    template = router_template(router={"drainTimeoutSeconds": 600})
    container = template["spec"]["containers"][0]
    assert container["command"][container["command"].index("--grace-s") + 1] == "600"
    pre_stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert template["spec"]["terminationGracePeriodSeconds"] == pre_stop + 600 + 15


@pytest.mark.parametrize(
    ("installed", "engine", "limits"),
    [
        ("nvidia.com/gpu", {"tensorParallelSize": 4}, {"nvidia.com/gpu": "4"}),
        ("nvidia.com/gpu", {"resources": {"limits": {"memory": "8Gi"}}}, {"memory": "8Gi", "nvidia.com/gpu": "1"}),
        ("nvidia.com/gpu", {"gpuResourceName": "amd.com/gpu"}, {"amd.com/gpu": "1"}),
        ("nvidia.com/gpu", {"gpuResourceName": ""}, None),
        ("", {"gpuResourceName": "amd.com/gpu"}, {"amd.com/gpu": "1"}),
        ("", {}, None),
        ("nvidia.com/gpu", {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}, {"nvidia.com/mig-1g.10gb": "2"}),
        ("nvidia.com/gpu", {"resources": {"requests": {"amd.com/gpu": 1}}}, None),
        ("nvidia.com/gpu", {"resources": {"claims": [{"name": "gpu"}]}}, None),
        ("nvidia.com/gpu", {"emulation": {"gpu": "h100", "model": "m"}}, None),
    ],
)
def test_engines_get_the_gpus_that_they_share_unless_their_resources_name_a_device(installed, engine, limits) -> None:
    deployment = render_engines(check(engine=engine), 1, "i", installed)
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources.get("limits") == limits


def test_emulated_engines_fetch_what_routers_read_and_no_weights() -> None:
    hub: Any = {"name": "a/b", "source": {"huggingFace": {}}}
    emulation = {"gpu": "h100-80g", "model": "qwen2.5-14b"}
    *_, real = engine_template(model=hub)["spec"]["initContainers"]
    *_, emulated = engine_template(model=hub, engine={"emulation": emulation})["spec"]["initContainers"]
    *_, router = router_template(model=hub)["spec"]["initContainers"]
    everything = real["command"][real["command"].index("--") + 1 :]
    assert "--include" not in everything
    assert emulated["command"] == router["command"]
    assert not any("safetensors" in part for part in emulated["command"])


def test_the_example_for_kind_runs_on_nodes_without_gpus_and_volumes() -> None:
    manifest = yaml.safe_load((Path(__file__).parents[2] / "examples" / "kind-emulated.yaml").read_text())
    manifest["metadata"] |= {"namespace": "llm", "uid": "u"}
    inputs = RenderInputs(engine_replicas=4, has_monitors=False, live={})
    children = render_children(check_manifest(manifest), inputs, OperatorSettings(gpu_resource_name="nvidia.com/gpu"))
    pods = [child["spec"]["template"]["spec"] for child in children if child["kind"] == "Deployment"]
    assert len(pods) == 2
    for pod in pods:
        assert not any("persistentVolumeClaim" in volume for volume in pod["volumes"])
        amounts = [amount for kind in pod["containers"][0]["resources"].values() for amount in kind]
        assert set(amounts) <= {"cpu", "memory"}


def test_each_patch_of_the_guide_for_kind_changes_the_sliders_that_are_in_force() -> None:
    root = Path(__file__).parents[2]
    manifest = yaml.safe_load((root / "examples" / "kind-emulated.yaml").read_text())
    patches = re.findall(r"--type merge -p '(.+)'", (root / "docs" / "guides" / "kind.md").read_text())
    before = resolve_sliders(check_manifest(manifest).spec)
    assert patches
    for patch in map(json.loads, patches):
        assert resolve_sliders(check_manifest({**manifest, "spec": manifest["spec"] | patch["spec"]}).spec) != before


def test_a_gpu_name_of_the_installation_replaces_no_pod() -> None:
    digest = RESTART_HASH_ANNOTATION
    old, new = (render_engines(check(), 1, "i", name) for name in ("", "nvidia.com/gpu"))
    annotations = [item["spec"]["template"]["metadata"]["annotations"][digest] for item in (old, new)]
    assert annotations[0] == annotations[1]


def test_pods_run_under_the_service_account_of_the_manifest_and_without_its_token() -> None:
    given = {"serviceAccountName": "reads-models"}
    for template in (engine_template(engine=given), router_template(router=given)):
        assert template["spec"]["serviceAccountName"] == "reads-models"
        assert template["spec"]["automountServiceAccountToken"] is False
    assert engine_template()["spec"]["serviceAccountName"] == "tiny-engine"


@pytest.mark.parametrize("kind", ["secretKeyRef", "configMapKeyRef"])
def test_what_fetches_the_model_and_nothing_else_uses_proxy_mirror_and_authorities(kind: str) -> None:
    hub = {
        "endpoint": "https://hub.example.org",
        "proxy": {"httpsProxy": "http://proxy:3128", "noProxy": [".svc", "10.0.0.0/8"]},
        "caBundle": {kind: {"name": "authorities", "key": "all.pem"}},
    }
    plain = {"model": {"name": "a/b", "revision": COMMIT, "source": {"huggingFace": {}}}}
    model = {"model": {"name": "a/b", "revision": COMMIT, "source": {"huggingFace": hub}}}
    for render_template in (engine_template, router_template):
        spec = render_template(**model)["spec"]
        (fetch,) = spec["initContainers"]
        assert {item["name"]: item["value"] for item in fetch["env"]} == {
            "HF_HOME": "/tmp/huggingface",
            "HF_ENDPOINT": "https://hub.example.org",
            "HTTPS_PROXY": "http://proxy:3128",
            "NO_PROXY": ".svc,10.0.0.0/8",
            "SSL_CERT_FILE": "/etc/sluice/ca/ca.crt",
            "HF_HUB_DISABLE_XET": "1",
        }
        (mount,) = (item for item in fetch["volumeMounts"] if item["mountPath"] == "/etc/sluice/ca")
        (volume,) = (item for item in spec["volumes"] if item["name"] == mount["name"])
        source = volume.get("secret") or volume["configMap"]
        assert source["items"] == [{"key": "all.pem", "path": "ca.crt"}]
        assert spec["containers"][0] == render_template(**plain)["spec"]["containers"][0]


def test_shared_memory_is_part_of_the_memory_asked_for() -> None:
    template = engine_template(
        engine={"sharedMemory": "512Mi", "resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1000M"}}}
    )
    resources = template["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"memory": "1536Mi"}, "requests": {"memory": "1536870912"}}
    volume = next(item for item in template["spec"]["volumes"] if item["name"] == "shared-memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ({}, {"requests": {"cpu": "200m"}}),
        (
            {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}},
            {"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        ),
        ({"requests": {"cpu": 0}}, {"requests": {"cpu": "0"}}),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2"}}),
        # Kubernetes asks for as much as the limit then; more than the limit it would refuse.
        ({"limits": {"cpu": "100m"}}, {"limits": {"cpu": "100m"}}),
    ],
    ids=["nothing", "memory", "none-of-it", "more", "limit"],
)
def test_routers_ask_for_cpu_unless_the_user_says_how_much(given, rendered) -> None:
    template = router_template(router={"resources": given})
    assert template["spec"]["containers"][0]["resources"] == rendered


def test_the_definition_says_how_much_cpu_routers_ask_for() -> None:
    definition = yaml.safe_load((Path(__file__).parents[2] / "crds" / "servingclusters.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    text = schema["properties"]["router"]["properties"]["resources"]["description"]
    assert f" {CPU_REQUEST} of cpu " in text


def test_threads_follow_the_cpu_limit_unless_the_user_says_otherwise() -> None:
    def find(**engine: Any) -> Any:
        variables = engine_template(engine=engine)["spec"]["containers"][0]["env"]
        return [item for item in variables if item["name"] == "OMP_NUM_THREADS"]

    limits = {"resources": {"limits": {"cpu": "1500m"}}}
    assert find() == []
    assert find(**limits)[0]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert find(**limits, env=[{"name": "OMP_NUM_THREADS", "value": "1"}]) == [
        {"name": "OMP_NUM_THREADS", "value": "1"}
    ]


def test_a_volume_is_mounted_read_only_in_engines_and_routers() -> None:
    for template in (engine_template(), router_template()):
        volume = next(item for item in template["spec"]["volumes"] if item["name"] == "model")
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        mount = next(item for item in template["spec"]["containers"][0]["volumeMounts"] if item["name"] == "model")
        assert mount == {"name": "model", "mountPath": "/model", "readOnly": True, "subPath": "tiny"}


def test_a_model_of_the_hub_is_fetched_first_and_routers_fetch_no_weights() -> None:
    source = {"huggingFace": {"tokenSecretRef": {"name": "hub", "key": "token"}, "cacheClaimName": "cache"}}
    model = {"name": "org/model", "revision": COMMIT, "source": source}
    fields = {"model": model, "engine": {"extraArgs": ["--hf-overrides={}"]}}
    engine = engine_template(**fields)["spec"]["initContainers"][0]
    router = router_template(model=model)["spec"]["initContainers"][0]
    download = f"python -m huggingface_hub.cli.hf download org/model --local-dir /model --revision {COMMIT}"
    assert engine["command"][:3] == ["python", "-c", FETCH_PROGRAM]
    assert " ".join(engine["command"][3:]) == f"{download} --include *config.json -- {download} -- --hf-overrides={{}}"
    assert " ".join(router["command"]).startswith(f"{download} --include")
    assert "*.safetensors" not in router["command"]
    assert "*.json" in router["command"]
    token = next(item for item in engine["env"] if item["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    # Only what fetches sees the token, and may write.
    main = engine_template(model=model)["spec"]["containers"][0]
    assert "HF_TOKEN" not in json.dumps(main)
    mounts = {item["name"]: item for item in main["volumeMounts"]}
    assert mounts["model"] == {
        "name": "model",
        "mountPath": "/model",
        "readOnly": True,
        "subPath": f"org--model--{COMMIT}",
    }


@pytest.mark.parametrize(
    ("source", "of_engines", "of_routers"),
    [
        ({}, None, None),
        ({"cacheClaimName": "cache"}, f"org--model--{COMMIT}", f"org--model--{COMMIT}--tokenizer"),
    ],
    ids=["in the pod", "in a claim"],
)
def test_a_fetched_model_has_a_folder_of_its_own_where_clusters_share_it(source, of_engines, of_routers) -> None:
    model = {"name": "org/model", "revision": COMMIT, "source": {"huggingFace": source}}
    for template, folder in ((engine_template(model=model), of_engines), (router_template(model=model), of_routers)):
        containers = template["spec"]["initContainers"][0], template["spec"]["containers"][0]
        mounts = [mount for each in containers for mount in each["volumeMounts"] if mount["name"] == "model"]
        assert [mount.get("subPath") for mount in mounts] == [folder, folder]
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "model"]
        claim = {"persistentVolumeClaim": {"claimName": "cache"}} if source else {"emptyDir": {}}
        assert volume == {"name": "model", **claim}


def test_rdma_gives_devices_networks_and_a_check() -> None:
    template = engine_template(network=RDMA)
    container, preflight = template["spec"]["containers"][0], template["spec"]["initContainers"][0]
    for item in (container, preflight):
        assert item["resources"]["limits"]["rdma/hca"] == item["resources"]["requests"]["rdma/hca"] == "2"
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert preflight["command"] == [
        "python",
        "-m",
        "sluice_engine.kv_transfer.rdma_preflight",
        "--fabric",
        "RoCE",
        "--require",
    ]
    annotations = template["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "roce-a,other/roce-b"
    assert annotations["x/y"] == "z"


def test_rdma_by_claim() -> None:
    rdma = {"fabric": "InfiniBand", "resourceClaimTemplateName": "ib"}
    spec = engine_template(network={"mode": "RDMA", "rdma": rdma})["spec"]
    assert spec["resourceClaims"] == [{"name": "rdma", "resourceClaimTemplateName": "ib"}]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "rdma"}]


@pytest.mark.parametrize(
    "devices", [{"resourceName": "rdma/hca", "resourceCount": 3}, {"resourceClaimTemplateName": "ib"}]
)
def test_rdma_s_devices_come_beside_the_user_s_own_resources(devices: dict[str, Any]) -> None:
    own = {"limits": {"cpu": "4"}, "requests": {"cpu": "2"}, "claims": [{"name": "gpus"}]}
    network = {"mode": "RDMA", "rdma": {"fabric": "InfiniBand", **devices}}
    spec = engine_template(network=network, engine={"resources": own})["spec"]
    counted = {"rdma/hca": "3"} if "resourceName" in devices else {}
    claimed = [] if counted else [{"name": "rdma"}]
    assert spec["containers"][0]["resources"] == {
        "limits": {"cpu": "4", **counted},
        "requests": {"cpu": "2", **counted},
        "claims": [{"name": "gpus"}, *claimed],
    }
    assert spec["initContainers"][0]["resources"] == (
        {"limits": counted, "requests": counted} if counted else {"claims": claimed}
    )
    assert ("resourceClaims" in spec) == (not counted)


# What is in force already.


@pytest.mark.parametrize(
    ("wanted", "live", "verdict"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": {"b": 1}}, {"a": None}, False),
        ([1, 2], [1, 2, 3], False),
        ([{"name": "x", "v": 1}], [{"name": "y"}, {"name": "x", "v": 1, "w": 2}], True),
        ([{"name": "x", "v": 1}], [{"name": "y"}], False),
        ({"a": False}, {}, True),
        ({"a": ""}, {}, True),
        ({"a": {}}, {}, True),
        ({"a": []}, {}, True),
        ({"a": True}, {}, False),
        ({"cpu": "1000m"}, {"cpu": "1"}, True),
        ({"cpu": 1}, {"cpu": "1"}, True),
        ({"memory": "1024Mi"}, {"memory": "1Gi"}, True),
        ({"memory": "1024Mi"}, {"memory": "1G"}, False),
    ],
    ids=str,
)
def test_a_child_is_applied_when_the_live_object_has_every_desired_value(wanted, live, verdict) -> None:
    assert is_applied(wanted, live) is verdict


@settings(deadline=None)
@given(st.recursive(st.integers() | st.text() | st.booleans(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_every_object_is_applied_where_it_is_live(value) -> None:
    assert is_applied(value, value)


@pytest.mark.parametrize("has_limit", [True, False])
def test_libraries_count_as_many_cores_as_an_engine_may_use(*, has_limit: bool) -> None:
    """A quota is invisible to those that count the machine's."""
    template = engine_template(engine={"resources": {"limits": {"cpu": "4"}} if has_limit else {}})
    (engine,) = [item for item in template["spec"]["containers"] if item["name"] == "engine"]
    found = [item for item in engine["env"] if item["name"] == "OMP_NUM_THREADS"]
    limit = {"containerName": "engine", "resource": "limits.cpu", "divisor": "1"}
    assert found == ([{"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}}] if has_limit else [])
