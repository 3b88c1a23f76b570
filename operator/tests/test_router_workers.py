"""Workers: containers of a router pod that share the clients' ports and load."""

from __future__ import annotations

from typing import Any

import pytest
from children_harness import check, render, router_template
from cluster_harness import KEY, World

from sluice_operator.api.labels import COMPONENT_LABEL, RESTART_HASH_ANNOTATION
from sluice_operator.api.manifest import ManifestError
from sluice_operator.api.names import ROUTER
from sluice_operator.kubernetes.kinds import PODS
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.resources.pods.pod_status import read_pod

USERS = {
    "resources": {"requests": {"cpu": "2"}},
    "podTemplate": {
        "spec": {
            "containers": [
                {"name": "router", "env": [{"name": "TEAM", "value": "chat"}], "workingDir": "/srv"},
                {"name": "side", "image": "side:1"},
            ]
        }
    },
}


def workers(number: int, **router: Any) -> list[Any]:
    containers: list[Any] = router_template(router={"workers": number, **router})["spec"]["containers"]
    return containers


def options(container: Any) -> dict[str, str]:
    command = container["command"]
    return dict(zip(command[3::2], command[4::2], strict=False))


def test_workers_share_the_clients_ports_and_have_their_own_for_control_and_metrics() -> None:
    found = workers(3)
    assert [container["name"] for container in found] == ["router", "router-1", "router-2"]
    names = ("--http-port", "--grpc-port", "--control-port", "--metrics-port", "--share-ports")
    assert [tuple(options(container)[name] for name in names) for container in found] == [
        ("8000", "8001", "8002", "9090", "true"),
        ("8000", "8001", "8003", "9091", "true"),
        ("8000", "8001", "8004", "9092", "true"),
    ]
    # Each is probed by itself; Kubernetes takes no port twice.
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    ports = [{container[probe]["httpGet"]["port"] for probe in probes} for container in found]
    assert ports == [{9090}, {9091}, {9092}]
    declared = [(port["name"], port["containerPort"]) for container in found for port in container["ports"]]
    assert len({name for name, _ in declared}) == len({port for _, port in declared}) == len(declared) == 8
    differs = {"name", "command", "ports", *probes}
    first, *others = ({field: container[field] for field in container.keys() - differs} for container in found)
    assert all(other == first for other in others)


def test_one_worker_keeps_its_port_to_itself() -> None:
    (only,) = workers(1)
    assert "--share-ports" not in options(only)


def test_what_users_say_of_the_routers_container_is_for_each_worker() -> None:
    *found, side = workers(2, **USERS)
    assert side == {"name": "side", "image": "side:1"}
    for container in found:
        assert container["workingDir"] == "/srv"
        assert {"name": "TEAM", "value": "chat"} in container["env"]
        assert container["resources"]["requests"]["cpu"] == "2"


@pytest.mark.parametrize("name", ["router-1", "router-7"])
def test_a_workers_container_is_not_named_by_users(name: str) -> None:
    over = {"spec": {"containers": [{"name": name, "command": ["sh"]}]}}
    with pytest.raises(ManifestError, match="is a worker's container; use router, which is for all workers"):
        check(router={"podTemplate": over})
    # Pods of engines have no workers.
    check(engine={"podTemplate": over})
    check(router={"podTemplate": {"spec": {"containers": [{"name": "router-8"}]}}})


@pytest.mark.parametrize("number", [0, 9])
def test_there_are_one_to_eight(number: int) -> None:
    with pytest.raises(ManifestError, match=r"router\.workers"):
        check(router={"workers": number})


def test_services_monitors_and_policies_know_every_worker() -> None:
    children = render(router={"workers": 2}, has_monitors=True)
    ports = children["Service", "tiny-router-control"]["spec"]["ports"]
    expected = {"control": 8002, "metrics": 9090, "control-1": 8003, "metrics-1": 9091}
    assert {port["name"]: port["targetPort"] for port in ports} == expected
    assert [port["targetPort"] for port in children["Service", "tiny-router"]["spec"]["ports"]] == [8000, 8001]
    clients, control, metrics = children["NetworkPolicy", "tiny-router"]["spec"]["ingress"]
    found = [[port["port"] for port in rule["ports"]] for rule in (clients, control, metrics)]
    assert found == [[8000, 8001], [8002, 8003], [9090, 9091]]
    assert [item["port"] for item in children["ServiceMonitor", "tiny-router"]["spec"]["endpoints"]] == [
        "metrics",
        "metrics-1",
    ]
    assert [item["port"] for item in children["ServiceMonitor", "tiny-engine"]["spec"]["endpoints"]] == ["metrics"]


def test_limits_are_shared_among_all_workers_and_a_change_restarts_the_pods() -> None:
    cluster = check(router={"replicas": 3, "workers": 2})
    assert render_plan(cluster, {}, generation=1, cluster_uid="u").num_routers == 6
    hashes = {
        router_template(router={"workers": number})["metadata"]["annotations"][RESTART_HASH_ANNOTATION]
        for number in (1, 2)
    }
    assert len(hashes) == 2


def test_a_pod_says_how_many_it_has() -> None:
    def count(*names: str) -> int:
        spec = {"containers": [{"name": name} for name in names]}
        return read_pod({"metadata": {"name": "p", "uid": "u"}, "spec": spec, "status": {}}).num_workers

    assert [count("router"), count("router", "istio-proxy"), count("router", "router-1", "side")] == [1, 1, 2]


async def test_the_operator_speaks_with_each_worker_and_waits_for_the_plan_of_each() -> None:
    world = World(router={"replicas": 2, "workers": 2})
    await world.settle()
    pods = sorted(pod["metadata"]["name"] for pod in world.kubernetes.select(PODS, labels={COMPONENT_LABEL: ROUTER}))
    known = world.routers.addresses[KEY]
    assert sorted(known) == sorted(name for pod in pods for name in (pod, f"{pod}-1"))
    assert sorted(address.worker for address in known.values()) == [0, 0, 1, 1]
    assert world.conditions["Ready"] == ("True", "Serving")
    assert world.status["readyRouterReplicas"] == 2
