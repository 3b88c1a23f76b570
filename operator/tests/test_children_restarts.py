"""Which edits change a pod template, and which restart nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from children_harness import SETTINGS, check, engine_template, render, router_template
from fake_kubernetes import make_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.labels import RESTART_HASH_ANNOTATION, TEMPLATE_ANNOTATION
from sluice_operator.resources.children import RenderInputs, key_of, render_children
from sluice_operator.resources.rollout_hash import (
    RESTARTS_ENGINES,
    RESTARTS_ROUTERS,
    compute_rollout_hash,
    keep_pod_template,
)

LIVE_EDITS: list[dict[str, Any]] = [
    {"replicas": 9},
    {"prefillHeavy": 3},
    {"chunkSizes": {"prefillHeavy": 1024, "decodeHeavy": 0}},
    {"slo": {"ttftMilliseconds": 1, "tpotMilliseconds": 1, "attainment": "50%"}},
    {"strategy": "Aggregated"},
    {"parameters": {"watermarkPercent": 60}},
    {"router": {"replicas": 7}},
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(LIVE_EDITS), max_size=4))
def test_live_fields_are_in_no_pod_template(edits) -> None:
    spec: dict[str, Any] = {}
    for edit in edits:
        spec |= edit
    assert engine_template(**spec) == engine_template()
    assert router_template(**spec) == router_template()


@pytest.mark.parametrize(
    ("edit", "is_engine", "is_router"),
    [
        ({"engine": {"image": "other:1"}}, True, False),
        ({"engine": {"extraArgs": ["--seed", "3"]}}, True, False),
        ({"engine": {"env": [{"name": "A", "value": "1"}]}}, True, False),
        ({"router": {"env": [{"name": "A", "value": "1"}]}}, False, True),
        ({"network": {"kvPort": 5700}}, True, False),
        ({"router": {"image": "other:1", "replicas": 2}}, False, True),
        ({"router": {"resources": {"limits": {"cpu": 1}}, "replicas": 2}}, False, True),
        ({"model": {"name": "m", "source": {"persistentVolumeClaim": {"claimName": "other"}}}}, True, True),
    ],
    ids=lambda value: next(iter(next(iter(value.values())))) if isinstance(value, dict) else None,
)
def test_restarting_fields_change_the_hash_of_those_that_they_restart(edit, is_engine, is_router) -> None:
    base = make_cluster()["spec"]["engine"]
    if "engine" in edit:
        edit = {"engine": {**base, **edit["engine"]}}

    def digest(template: Any) -> str:
        text: str = template["metadata"]["annotations"][RESTART_HASH_ANNOTATION]
        return text

    assert (digest(engine_template(**edit)) != digest(engine_template())) == is_engine
    assert (digest(router_template(**edit)) != digest(router_template())) == is_router


def test_a_new_operator_computes_the_hash_that_the_last_one_did() -> None:
    """Where it is another one, an upgrade of the operator replaces every pod of every cluster."""
    spec = check(engine={"image": "e:1"}, router={"image": "r:1"}).spec
    assert compute_rollout_hash(spec, RESTARTS_ENGINES, "e:1") == "e8c77932e6d11e32"
    assert compute_rollout_hash(spec, RESTARTS_ROUTERS, "r:1", "control") == "7de7cfb1d7ade309"


def test_pods_of_a_manifest_that_names_no_image_restart_with_the_operators_own() -> None:
    def digests(**images: str) -> list[str]:
        settings = SETTINGS.model_copy(update=images)
        inputs = RenderInputs(engine_replicas=1, has_monitors=False, live={})
        children = {key_of(child): child for child in render_children(check(), inputs, settings)}
        templates = (children["Deployment", f"tiny-{name}"]["spec"]["template"] for name in ("engine", "router"))
        return [template["metadata"]["annotations"][RESTART_HASH_ANNOTATION] for template in templates]

    engine, router = digests()
    assert digests(engine_image="other:1")[0] != engine
    assert digests(engine_image="other:1")[1] == router
    assert digests(router_image="other:1")[0] == engine
    assert digests(router_image="other:1")[1] != router


def test_an_operator_that_renders_differently_keeps_the_template_until_something_restarts() -> None:
    live = render()["Deployment", "tiny-engine"]
    changed = copy.deepcopy(live)
    changed["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSeconds"] = 99
    assert keep_pod_template(changed, live)["spec"]["template"] == live["spec"]["template"]
    changed["spec"]["template"]["metadata"]["annotations"][RESTART_HASH_ANNOTATION] = "other"
    assert keep_pod_template(changed, live)["spec"]["template"] == changed["spec"]["template"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"metadata": 1, "spec": {}}'])
def test_a_kept_template_that_somebody_has_been_at_is_rendered_anew(text) -> None:
    live = render()["Deployment", "tiny-engine"]
    damaged = copy.deepcopy(live)
    damaged["metadata"]["annotations"][TEMPLATE_ANNOTATION] = text
    assert keep_pod_template(live, damaged)["spec"]["template"] == live["spec"]["template"]


def test_what_is_kept_of_a_template_does_not_depend_on_the_order_of_its_fields() -> None:
    """Another order of the same fields writes nothing."""

    def reverse(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(reverse, value))
        return {name: reverse(value[name]) for name in reversed(value)} if isinstance(value, dict) else value

    deployment = {"metadata": {}, "spec": {"template": engine_template()}}
    kept = keep_pod_template(deployment, None)["metadata"]["annotations"]
    assert keep_pod_template(reverse(deployment), None)["metadata"]["annotations"] == kept
