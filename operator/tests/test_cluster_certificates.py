"""API keys and certificates: mounts, commands, cert-manager's Certificates, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from children_harness import SETTINGS, check, engine_template, render, router_template
from cluster_harness import KEY, World

from sluice_operator.api.condition_types import Reason
from sluice_operator.api.labels import COMPONENT_LABEL
from sluice_operator.api.names import ROUTER
from sluice_operator.controller.preconditions import check_cluster
from sluice_operator.kubernetes.kinds import CERTIFICATES, CLUSTERS, DEPLOYMENTS, PODS, kind_of
from sluice_operator.resources.children import RenderInputs, key_of, render_children
from sluice_operator.settings import OperatorSettings

KEYS = {"mode": "APIKey", "apiKey": {"secretName": "keys"}}
GIVEN = {"mode": "SecretRef", "secretName": "given"}
ISSUED = {"mode": "CertManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}
ALL = {"router": {"replicas": 2, "auth": KEYS, "tls": GIVEN}, "network": {"tls": GIVEN}}
SECURED = SETTINGS.model_copy(update={"peer_tls": "/etc/sluice/peer-tls"})


def options(template: Any) -> dict[str, str]:
    command = template["spec"]["containers"][0]["command"]
    return dict(zip(command[3::2], command[4::2], strict=False))


def secrets(template: Any) -> dict[str, str]:
    """Name of each mounted Secret by its folder."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = [
        mount for mount in template["spec"]["containers"][0]["volumeMounts"] if "secret" in volumes[mount["name"]]
    ]
    assert all(mount["readOnly"] and "subPath" not in mount for mount in mounts)
    return {mount["mountPath"]: volumes[mount["name"]]["secret"]["secretName"] for mount in mounts}


def test_the_router_command_names_certificates_and_peers() -> None:
    template = router_template(**ALL)
    found = options(template)
    assert {
        name: found[name] for name in ("--api-keys", "--front-tls", "--peer-tls", "--engine-name", "--control-name")
    } == {
        "--api-keys": "/etc/sluice/api-keys",
        "--front-tls": "/etc/sluice/front-tls",
        "--peer-tls": "/etc/sluice/peer-tls",
        "--engine-name": "tiny-engines.default.svc",
        "--control-name": f"sluice-operator.{SETTINGS.namespace}.svc",
    }
    assert secrets(template) == {
        "/etc/sluice/api-keys": "keys",
        "/etc/sluice/front-tls": "given",
        "/etc/sluice/peer-tls": "given",
    }
    assert template["metadata"]["annotations"]["sluice.dev/control-tls"] == "tiny-router-control.default.svc"


def test_engines_get_what_is_between_them_and_routers_and_nothing_of_clients() -> None:
    template = engine_template(**ALL)
    found = options(template)
    assert found["--peer-tls"] == "/etc/sluice/peer-tls"
    assert found["--router-name"] == "tiny-router-control.default.svc"
    assert secrets(template) == {"/etc/sluice/peer-tls": "given"}
    assert "keys" not in str(template)


@pytest.mark.parametrize("template", [engine_template, router_template], ids=["engine", "router"])
def test_without_security_nothing_of_it_is_rendered(template) -> None:
    rendered = template()
    assert secrets(rendered) == {}
    assert not {"--api-keys", "--front-tls", "--peer-tls", "--router-name"} & set(options(rendered))
    assert "sluice.dev/control-tls" not in rendered["metadata"]["annotations"]


def test_one_certificate_each_is_rendered_for_cert_manager() -> None:
    children = render(router={"replicas": 1, "tls": ISSUED}, network={"tls": ISSUED})
    certificates = {name: child["spec"] for (kind, name), child in children.items() if kind == "Certificate"}
    assert {name: (spec["secretName"], spec["dnsNames"]) for name, spec in certificates.items()} == {
        "tiny-engine-tls": ("tiny-engine-tls", ["tiny-engines.default.svc"]),
        "tiny-router-tls": ("tiny-router-tls", ["tiny-router-control.default.svc"]),
        "tiny-front-tls": (
            "tiny-front-tls",
            ["tiny-router", "tiny-router.default", "tiny-router.default.svc", "tiny-router.default.svc.cluster.local"],
        ),
    }
    for spec in certificates.values():
        assert spec["issuerRef"] == {"group": "cert-manager.io", "kind": "ClusterIssuer", "name": "ca"}
        assert spec["privateKey"] == {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"}
    assert certificates["tiny-engine-tls"]["usages"] == ["digital signature", "server auth", "client auth"]
    assert certificates["tiny-front-tls"]["usages"] == ["digital signature", "server auth"]
    template = children["Deployment", "tiny-engine"]["spec"]["template"]
    assert secrets(template) == {"/etc/sluice/peer-tls": "tiny-engine-tls"}
    assert secrets(children["Deployment", "tiny-router"]["spec"]["template"]) == {
        "/etc/sluice/front-tls": "tiny-front-tls",
        "/etc/sluice/peer-tls": "tiny-router-tls",
    }
    assert all(kind_of(child) for child in children.values())


def test_names_of_ones_own_take_the_place_of_the_services() -> None:
    tls = {**ISSUED, "dnsNames": ["llm.example.com"]}
    children = render(router={"replicas": 1, "tls": tls})
    assert children["Certificate", "tiny-front-tls"]["spec"]["dnsNames"] == ["llm.example.com"]


def test_an_issuer_or_a_name_is_changed_without_a_restart() -> None:
    def hashes(tls: dict[str, Any], network: dict[str, Any]) -> list[str]:
        spec = {"router": {"replicas": 1, "tls": tls}, "network": {"tls": network}}
        templates = (engine_template(**spec), router_template(**spec))
        return [template["metadata"]["annotations"]["sluice.dev/restart-hash"] for template in templates]

    other = {**ISSUED, "issuerRef": {"name": "other"}}
    assert hashes(ISSUED, ISSUED) == hashes({**other, "dnsNames": ["a.b"]}, other)
    engine, router = hashes(ISSUED, {})
    for changed in (hashes(ISSUED, ISSUED), hashes(ISSUED, GIVEN)):
        assert changed[0] != engine
        assert changed[1] != router
    # The front's matters to routers alone.
    assert hashes(GIVEN, {})[0] == engine
    assert hashes(GIVEN, {})[1] != router


def test_routers_restart_when_they_are_to_trust_another_operator() -> None:
    def digest(namespace: str, **spec: Any) -> str:
        settings = SETTINGS.model_copy(update={"namespace": namespace})
        inputs = RenderInputs(engine_replicas=1, has_monitors=False, live={})
        children = {key_of(child): child for child in render_children(check(**spec), inputs, settings)}
        template = children["Deployment", "tiny-router"]["spec"]["template"]
        text: str = template["metadata"]["annotations"]["sluice.dev/restart-hash"]
        return text

    assert digest("here", network={"tls": GIVEN}) != digest("there", network={"tls": GIVEN})
    assert digest("here") == digest("there")


def body(**spec: Any) -> Any:
    cluster = check(**spec)
    return cluster.model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.mark.parametrize(
    ("spec", "settings", "has_cert_manager", "words"),
    [
        (ALL, SECURED, False, None),
        ({"router": {"replicas": 1, "auth": KEYS, "tls": GIVEN}}, SETTINGS, False, None),
        ({"router": {"replicas": 1, "tls": ISSUED}, "network": {"tls": ISSUED}}, SECURED, True, None),
        (
            {"network": {"tls": GIVEN}},
            SETTINGS,
            True,
            "spec.network.tls: the operator has no certificate for the routers' control ports; install the chart with",
        ),
        (
            {"router": {"replicas": 1, "tls": ISSUED}},
            SECURED,
            False,
            "spec.router.tls: cert-manager's Certificates (certificates.cert-manager.io) are not known",
        ),
        ({"network": {"tls": ISSUED}}, SECURED, False, "spec.network.tls: cert-manager's Certificates"),
    ],
    ids=["all", "keys and front", "cert-manager", "no certificate of the operator", "no cert-manager", "nor within"],
)
def test_a_missing_precondition_is_refused_by_name(spec, settings, has_cert_manager, words) -> None:
    cluster, failure = check_cluster(body(**spec), settings, has_cert_manager=has_cert_manager)
    if words is None:
        assert failure is None
        assert cluster is not None
    else:
        assert cluster is None
        assert failure is not None
        assert failure.reason is Reason.NOT_AVAILABLE
        assert words in failure.message
        assert "; install" in failure.message


async def test_a_cluster_waits_for_cert_manager_and_goes_on_when_it_is_there() -> None:
    world = World(router={"replicas": 1, "tls": ISSUED})
    await world.settle()
    assert world.conditions["SpecValid"] == ("False", "NotAvailable")
    assert world.conditions["Ready"] == ("False", "SpecInvalid")
    assert world.kubernetes.select(DEPLOYMENTS) == []
    # Nobody tells when cert-manager comes.
    assert await world.reconcile() == 30.0
    world.kubernetes.has_cert_manager = True
    await world.settle()
    assert world.conditions["SpecValid"] == ("True", "Valid")
    assert world.conditions["Ready"] == ("True", "Serving")
    assert [child["metadata"]["name"] for child in world.kubernetes.select(CERTIFICATES)] == ["tiny-front-tls"]


async def test_certificates_are_pruned_when_the_spec_drops_them() -> None:
    world = World(router={"replicas": 1, "tls": ISSUED})
    world.kubernetes.has_cert_manager = True
    await world.settle()
    world.edit(router={"tls": {**GIVEN, "issuerRef": None}})
    await world.settle()
    assert world.kubernetes.select(CERTIFICATES) == []
    assert world.conditions["Ready"] == ("True", "Serving")


async def test_a_certificate_that_is_not_issued_is_named() -> None:
    world = World(router={"replicas": 1, "tls": ISSUED})
    world.kubernetes.has_cert_manager = True
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")

    async def say(ready: str, issuing: str, message: str) -> None:
        conditions = [
            {"type": "Ready", "status": ready, "message": "Issuing certificate as Secret does not exist"},
            {"type": "Issuing", "status": issuing, "message": message},
        ]
        world.kubernetes.edit(CERTIFICATES, "tiny-front-tls", {"status": {"conditions": conditions}})
        await world.settle()

    await say("False", "True", "")
    assert world.conditions["Degraded"] == ("False", "AsExpected")
    await say("False", "False", "the issuer refused")
    assert world.conditions["Degraded"] == ("True", "MountFailed")
    assert "Certificate tiny-front-tls is not issued: the issuer refused" in world.message("Degraded")
    await say("True", "False", "")
    assert world.conditions["Degraded"] == ("False", "AsExpected")


async def test_the_operator_speaks_with_each_router_as_that_router_does() -> None:
    world = World(**ALL)
    world.settings = OperatorSettings(identity="a", namespace="sluice-system", peer_tls="/x")
    world.start_operator()
    await world.settle()
    routers = world.kubernetes.select(PODS, labels={COMPONENT_LABEL: ROUTER})
    names = {pod["metadata"]["name"]: "tiny-router-control.default.svc" for pod in routers}
    assert {name: given.server_name for name, given in world.routers.addresses[KEY].items()} == names
    # One that was made before TLS was turned on.
    world.kubernetes.edit(PODS, next(iter(names)), {"metadata": {"annotations": {"sluice.dev/control-tls": None}}})
    await world.reconcile()
    names[next(iter(names))] = ""
    assert {name: given.server_name for name, given in world.routers.addresses[KEY].items()} == names


async def test_no_secret_is_ever_read() -> None:
    world = World(**ALL)
    world.settings = OperatorSettings(identity="a", namespace="sluice-system", peer_tls="/x")
    world.kubernetes.has_cert_manager = True
    world.start_operator()
    await world.settle()
    assert not {plural for _, plural in world.kubernetes.calls if "secret" in plural}
    assert CLUSTERS.plural in {plural for _, plural in world.kubernetes.calls}
