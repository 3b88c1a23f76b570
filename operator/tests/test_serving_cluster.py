"""The manifest: each field with its default and bounds, the rules between fields, and the refusals' messages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from verdicts import LEAST

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import ManifestModel
from sluice_operator.api.manifest import ManifestError, check_manifest, parse_manifest
from sluice_operator.api.spec_changes import diff_specs

EXAMPLES = Path(__file__).parents[2] / "examples"


def edit(path: str, value: Any) -> dict[str, Any]:
    """The least manifest with one field set; missing parents are made."""
    content = copy.deepcopy(LEAST)
    *parents, last = path.split(".")
    part = content
    for name in parents:
        part = part.setdefault(name, {})
    part[last] = value
    return content


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        check_manifest(content)
    return [str(problem) for problem in caught.value.problems]


DEFAULTS = {
    "replicas": 2,
    "prefillHeavy": "50%",
    "chunkSizes.prefillHeavy": 1024,
    "chunkSizes.decodeHeavy": 256,
    "slo.attainment": "90%",
    "slo.classes": [],
    "strategy": "Sluice",
    "parameters.watermarkPercent": 95,
    "parameters.approachingFactorPercent": 96,
    "parameters.earlyRejection": "Off",
    "parameters.minTokensBetweenMoves": 16,
    "parameters.prefillBatchTokens": 2048,
    "parameters.grantWaitMilliseconds": 10_000,
    "parameters.tpotSharePercent": 98,
    "parameters.lateTtftFactorPercent": 300,
    "parameters.leastPrefillPercent": 10,
    "parameters.lateSharePercent": 0,
    "parameters.overloadOrder": "LongestLast",
    "parameters.packSharePercent": 85,
    "parameters.creditMilliseconds": 100,
    "parameters.macroInstanceLeast": 4,
    "parameters.macroInstanceMost": 16,
    "parameters.splitSearchSteps": 6,
    "parameters.splitMarginTokens": 20,
    "parameters.tbtTargetMilliseconds": 0,
    "engine.tensorParallelSize": 1,
    "engine.maxBatchTokens": 8192,
    "engine.maxModelLen": None,
    "engine.startupTimeoutSeconds": 1800,
    "engine.drainTimeoutSeconds": 300,
    "engine.resumeTimeoutSeconds": 30,
    "network.mode": "TCP",
    "network.kvPort": 5600,
    "router.replicas": 2,
    "router.drainTimeoutSeconds": 300,
    "autotune.mode": "Off",
    "autotune.cooldownSeconds": 300,
}


@pytest.mark.parametrize(("path", "default"), DEFAULTS.items(), ids=DEFAULTS)
def test_defaults_are_those_of_the_table(path: str, default: object) -> None:
    found = check_manifest(LEAST).model_dump(mode="json", by_alias=True)["spec"]
    for name in path.split("."):
        found = found[name]
    assert found == default


BOUNDS = [
    ("spec.replicas", 1, 1024),
    ("spec.slo.ttftMilliseconds", 1, 600_000),
    ("spec.slo.tpotMilliseconds", 1, 60_000),
    ("spec.parameters.watermarkPercent", 50, 99),
    ("spec.parameters.approachingFactorPercent", 50, 100),
    ("spec.parameters.prefillBatchTokens", 0, 1_048_576),
    ("spec.parameters.grantWaitMilliseconds", 1, 25_000),
    ("spec.parameters.tpotSharePercent", 50, 100),
    ("spec.parameters.lateTtftFactorPercent", 100, 400),
    ("spec.parameters.leastPrefillPercent", 0, 100),
    ("spec.parameters.lateSharePercent", 0, 100),
    ("spec.parameters.packSharePercent", 0, 100),
    ("spec.parameters.creditMilliseconds", 0, 10_000),
    ("spec.parameters.macroInstanceLeast", 1, 256),
    ("spec.parameters.macroInstanceMost", 1, 1024),
    ("spec.parameters.splitSearchSteps", 1, 16),
    ("spec.parameters.splitMarginTokens", 0, 65_536),
    ("spec.parameters.tbtTargetMilliseconds", 0, 60_000),
]


@pytest.mark.parametrize(("path", "low", "high"), BOUNDS, ids=[path for path, _, _ in BOUNDS])
def test_bounds_hold_at_both_ends(path: str, low: int, high: int) -> None:
    check_manifest(edit(path, low))
    check_manifest(edit(path, high))
    assert problems(edit(path, low - 1)) == [
        f"{path}: {low - 1} is below the least allowed value, {low}; use {low} or more"
    ]
    assert problems(edit(path, high + 1)) == [
        f"{path}: {high + 1} is above the greatest allowed value, {high}; use {high} or less"
    ]


REFUSED = [
    ("spec.replicas", "2", "spec.replicas: '2' is not a whole number; write one without quotes"),
    ("spec.replicas", 2.5, "spec.replicas: 2.5 is not a whole number"),
    ("spec.replicas", True, "spec.replicas: True is not a whole number"),
    ("spec.prefillHeavy", "101%", 'spec.prefillHeavy: \'101%\' must be a whole number or "0%" to "100%"'),
    ("spec.prefillHeavy", -1, "spec.prefillHeavy: -1 must not be negative"),
    (
        "spec.prefillHeavy",
        3,
        "spec.prefillHeavy: 3 is above replicas, 2; lower it, raise replicas, or use a percentage",
    ),
    ("spec.chunkSizes", {"prefillHeavy": 8}, "spec.chunkSizes.prefillHeavy: 8 is below the least allowed value, 16"),
    ("spec.chunkSizes", {"decodeHeavy": 9}, "spec.chunkSizes.decodeHeavy: 9 is below the least chunk size, 16"),
    (
        "spec.chunkSizes",
        {"prefillHeavy": 9000},
        "spec.chunkSizes.prefillHeavy: 9000 is above engine.maxBatchTokens, 8192; lower it, or raise that",
    ),
    ("spec.slo.attainment", 90, "spec.slo.attainment: 90 is not text; put it in quotes"),
    ("spec.slo.attainment", "0%", "spec.slo.attainment: '0%' does not have the required form"),
    (
        "spec.strategy",
        "taichi",
        "spec.strategy: 'taichi' is not one of 'TaiChi', 'Aggregated', 'Disaggregated', 'DynaServe', 'FlowPrefill',",
    ),
    (
        "spec.parameters.earlyRejection",
        False,
        "'Random' or 'Reject'; use one of them: YAML reads a bare Off as false, so write Disabled",
    ),
    ("spec.replica", 2, "spec.replica: is not a field of ServingCluster; remove it (did you mean replicas?)"),
    ("spec.engine.xyz", 2, "spec.engine.xyz: is not a field of ServingCluster; remove it (known here: affinity, "),
    ("spec.model.source", {}, "spec.model.source: '{}' must hold exactly one of huggingFace"),
    (
        "spec.engine.extraArgs",
        ["--dtype=half", "--max_num_batched_tokens=9"],
        "spec.engine.extraArgs[1]: '--max_num_batched_tokens=9' is set by Sluice; remove it and use spec.engine.max",
    ),
    ("spec.engine.env", [{"name": "UCX_TLS", "value": "tcp"}], "spec.engine.env[0].name: 'UCX_TLS' is set by Sluice"),
    ("spec.engine.env", [{"name": "A"}], "spec.engine.env[0]: 'A' needs either value or valueFrom"),
    ("spec.network.kvPort", 8010, "spec.network.kvPort: 8010 is the port of the engine's gRPC server"),
    ("spec.network.tcpPortRange", "7099-7000", "spec.network.tcpPortRange: '7099-7000' must be two ports"),
    ("spec.network.tcpPortRange", "5500-5700", "spec.network.tcpPortRange: '5500-5700' contains 5600"),
    ("spec.network.mode", "RDMA", "spec.network.rdma: None is required by network.mode RDMA"),
    (
        "spec.network.rdma",
        {"fabric": "EFA", "resourceName": "a/b"},
        "spec.network.rdma: '{...}' needs network.mode RDMA",
    ),
    ("spec.router.auth.mode", "Basic", "spec.router.auth.mode: 'Basic' is not one of 'None', 'APIKey', 'JWT'"),
    ("spec.router.auth.mode", "APIKey", "spec.router.auth.apiKey: None is required by mode APIKey or APIKeyOrJWT"),
    ("spec.router.tls.secretName", "a", "spec.router.tls.secretName: '{...}' needs mode SecretRef; remove it"),
    ("spec.network.tls.mode", "CertManager", "spec.network.tls.issuerRef: None is required by mode CertManager"),
    ("spec.router.service.port", 8001, "spec.router.service.port: 8001 is the Service's port of the gRPC API"),
    ("spec.autotune.mode", "On", "spec.autotune.mode: 'On' is not one of 'Disabled', 'Off', 'Recommend' or 'Apply'"),
    ("spec.engine.sharedMemory", "much", "spec.engine.sharedMemory: 'much' must be a Kubernetes quantity"),
    (
        "spec.model.source",
        {"persistentVolumeClaim": {"claimName": "a", "path": "b/../.."}},
        "path: 'b/../..' must stay inside its volume",
    ),
    ("metadata.name", "x" * 46, "metadata.name: 'xxx"),
    ("apiVersion", "sluice.dev/v2", "apiVersion: 'sluice.dev/v2' is not one of 'sluice.dev/v1alpha1'"),
    (
        "spec.autotune.bounds.replicas",
        {"min": 5, "max": 2},
        "spec.autotune.bounds.replicas.min: 5 is above max, 2; swap them",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{path}={value}" for path, value, _ in REFUSED])
def test_a_refusal_names_field_value_and_limit(path: str, value: object, message: str) -> None:
    assert any(message in problem for problem in problems(edit(path, value)))


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("spec.network.mode", "is not one of 'TCP' or 'RDMA'; use one of them"),
        ("spec.replicas", "is not a whole number; write one without quotes"),
    ],
)
def test_no_refusal_advises_what_the_field_does_not_take(path: str, limit: str) -> None:
    assert f"{path}: False {limit}" in problems(edit(path, value=False))


@pytest.mark.parametrize(
    "path", ["spec.slo.ttftMilliseconds", "spec.slo.tpotMilliseconds", "spec.model", "metadata.name"]
)
def test_missing_required_fields_are_refused(path: str) -> None:
    content = copy.deepcopy(LEAST)
    *parents, last = path.split(".")
    part = content
    for name in parents:
        part = part[name]
    del part[last]
    assert problems(content) == [f"{path}: is required; add it"]


def test_all_problems_are_named_at_once() -> None:
    content = edit("spec.replicas", 1)
    content["spec"] |= {"strategy": "TaiChi", "chunkSizes": {"prefillHeavy": 9000, "decodeHeavy": 0}}
    assert len(problems(content)) == 2


@pytest.mark.parametrize(
    ("replicas", "strategy", "decode_heavy", "is_allowed"),
    [
        (1, "TaiChi", 64, True),
        (1, "TaiChi", 0, False),
        (1, "Aggregated", 0, True),
        (1, "Sluice", 0, True),
        (1, "Disaggregated", 64, False),
    ],
)
def test_engines_without_prefills_need_another_one(
    replicas: int, strategy: str, decode_heavy: int, *, is_allowed: bool
) -> None:
    content = edit("spec.replicas", replicas)
    content["spec"] |= {"strategy": strategy, "chunkSizes": {"decodeHeavy": decode_heavy}}
    if is_allowed:
        check_manifest(content)
    else:
        assert "needs a P-heavy and a D-heavy engine; use 2" in problems(content)[0]


def test_rdma_rules() -> None:
    content = edit("spec.network", {"mode": "RDMA", "rdma": {"fabric": "EFA", "gidIndex": 3, "transports": ["rc"]}})
    content["spec"]["engine"] = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    found = " | ".join(problems(content))
    assert "exactly one of resourceName and resourceClaimTemplateName" in found
    assert "gidIndex: 3 is for RoCE; remove it for EFA" in found
    assert "transports: 'rc' cannot read GPU memory; add cuda_copy or cuda_ipc" in found


def test_class_names_differ() -> None:
    slo_class = {"name": "a", "ttftMilliseconds": 1, "tpotMilliseconds": 1}
    content = edit("spec.slo.classes", [slo_class, slo_class])
    assert "spec.slo.classes[1]: 'a' is named twice; rename or remove one" in problems(content)
    assert (
        "longer than the greatest allowed length, 16"
        in problems(edit("spec.slo.classes", [slo_class | {"name": f"c{i}"} for i in range(17)]))[0]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("kind: Pod", "holds 0 objects of kind ServingCluster, must hold one (kinds found: Pod)"),
        ("", "kinds found: none"),
    ],
)
def test_files_that_hold_no_cluster(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    parse_manifest(path.read_text())


EFFECTS = [
    ("spec.replicas", 3, FieldEffect.LIVE),
    ("spec.prefillHeavy", 1, FieldEffect.LIVE),
    ("spec.chunkSizes.decodeHeavy", 64, FieldEffect.LIVE),
    ("spec.slo.ttftMilliseconds", 600, FieldEffect.LIVE),
    ("spec.strategy", "Aggregated", FieldEffect.LIVE),
    ("spec.parameters.watermarkPercent", 90, FieldEffect.LIVE),
    ("spec.autotune.cooldownSeconds", 60, FieldEffect.LIVE),
    ("spec.router.replicas", 3, FieldEffect.LIVE),
    ("spec.router.image", "x", FieldEffect.RESTARTS_ROUTERS),
    ("spec.router.service.type", "NodePort", FieldEffect.RESTARTS_ROUTERS),
    ("spec.engine.maxBatchTokens", 4096, FieldEffect.RESTARTS_ENGINES),
    ("spec.network.kvPort", 5700, FieldEffect.RESTARTS_ENGINES),
    ("spec.model.name", "other", FieldEffect.RESTARTS_ALL),
]


@pytest.mark.parametrize(("path", "value", "effect"), EFFECTS, ids=[path for path, _, _ in EFFECTS])
def test_each_field_says_what_its_change_does(path: str, value: object, effect: FieldEffect) -> None:
    changes = diff_specs(check_manifest(LEAST).spec, check_manifest(edit(path, value)).spec)
    assert [(change.field, change.new, change.effect) for change in changes] == [(path, value, effect)]


def list_models(model: type[ManifestModel] = ManifestModel) -> list[type[ManifestModel]]:
    return [model, *(kind for child in model.__subclasses__() for kind in list_models(child))]


def test_every_field_is_described() -> None:
    models = list_models()
    names = [
        f"{model.__name__}.{name}" for model in models for name, f in model.model_fields.items() if not f.description
    ]
    assert len(models) > 20
    assert not names


def test_status_and_other_metadata_of_kubernetes_are_let_through() -> None:
    content = {**LEAST, "status": {"conditions": []}}
    content["metadata"] = {"name": "test", "resourceVersion": "3", "managedFields": []}
    assert yaml.safe_load(yaml.safe_dump(content))
    assert check_manifest(content).metadata.name == "test"


@pytest.mark.parametrize(
    "bounds",
    [
        {"replicas": {"min": 2, "max": 2}},
        {"prefillHeavy": {"min": 1, "max": 1}},
        {"prefillHeavy": {"min": "50%", "max": "50%"}},
        {"chunkSizes": {"prefillHeavy": {"min": 512, "max": 512}, "decodeHeavy": {"min": 64, "max": 64}}},
    ],
    ids=["replicas", "counts", "shares", "chunk sizes"],
)
def test_bounds_may_leave_no_choice(bounds: dict[str, Any]) -> None:
    check_manifest(edit("spec.autotune.bounds", bounds))


def test_clients_call_a_model_by_its_served_name_or_else_by_its_own() -> None:
    source = {"image": {"reference": "i"}}
    for model, name in (({"name": "org/m"}, "org/m"), ({"name": "org/m", "servedName": "m"}, "m")):
        assert check_manifest(edit("spec.model", {**model, "source": source})).served_name == name
