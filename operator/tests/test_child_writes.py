"""How one child is written, refused and deleted, and how each request passes its interceptors."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes, make_cluster

from sluice_operator.api.condition_types import Reason
from sluice_operator.api.manifest import check_manifest
from sluice_operator.kubernetes.errors import BusyError, ConflictError, ForbiddenError, InvalidError, KubernetesError
from sluice_operator.kubernetes.interceptors import InterceptedKubernetes
from sluice_operator.kubernetes.kinds import CERTIFICATES, CONFIG_MAPS, DISRUPTION_BUDGETS, PODS, SERVICES
from sluice_operator.resources.apply import ChildApplier
from sluice_operator.resources.children import key_of

UID = "u1"
QUOTA = 'pods "x" is forbidden: exceeded quota: q'


def make_child(kind: str = "Service", name: str = "tiny-router", *, owner: str = UID, **spec: Any) -> dict[str, Any]:
    """A child; ``owner`` is the uid of the cluster of this name that it belongs to, or somebody else's name."""
    api_version = {"Service": "v1", "ConfigMap": "v1", "Deployment": "apps/v1"}.get(kind)
    api_version = api_version or {"PodDisruptionBudget": "policy/v1"}.get(kind, "cert-manager.io/v1")
    owns = (
        {"kind": "ServingCluster", "name": "tiny", "uid": owner}
        if owner.startswith("u")
        else {"kind": "X", "name": owner, "uid": owner}
    )
    metadata = {"name": name, "namespace": "default", "ownerReferences": [{**owns, "controller": True}]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": {"a": 1, **spec}}


class Writing:
    """An applier of a cluster, with objects that are there; ``listed`` says which of them have the cluster's labels."""

    def __init__(self, *there: dict[str, Any], is_listed: bool = True) -> None:
        body = make_cluster()
        body["metadata"]["uid"] = UID
        self.kubernetes = FakeKubernetes()
        for item in there:
            self.kubernetes.put(deepcopy(item))
        found = {key_of(item): deepcopy(item) for item in self.kubernetes.objects.values()}
        self.applier = ChildApplier(self.kubernetes, check_manifest(body), found if is_listed else {})

    @property
    def failures(self) -> list[tuple[Reason, str]]:
        return [(failure.reason, failure.message) for failure in self.applier.failures]

    def fail(self, error: KubernetesError) -> None:
        def strike(verb: str, _plural: str) -> None:
            if verb not in ("get", "list"):
                raise error

        self.kubernetes.before = strike


APPLIED, READ = ("apply", "services"), ("get", "services")
CONFLICT = "Service tiny-router exists and is not this cluster's; rename or delete it, or rename the cluster"


@pytest.mark.parametrize(
    ("there", "is_listed", "calls", "is_foreign"),
    [
        ([], True, [READ, APPLIED], False),
        ([make_child()], True, [], False),
        ([make_child(b=2)], True, [], False),
        ([make_child(a=2)], True, [APPLIED], False),
        ([make_child()], False, [READ, APPLIED], False),
        # Alike, and with our labels, and yet another's.
        ([make_child(owner="x")], True, [], True),
        ([make_child(owner="x")], False, [READ], True),
        ([make_child(owner="x", a=2)], True, [], True),
    ],
    ids=[
        "new",
        "as it should be",
        "with more",
        "another",
        "without labels",
        "foreign",
        "foreign, no labels",
        "foreign, another",
    ],
)
async def test_a_child_is_written_where_it_is_ours_and_not_as_it_should_be(there, is_listed, calls, is_foreign) -> None:
    writing = Writing(*there, is_listed=is_listed)
    before = deepcopy(writing.kubernetes.objects)
    await writing.applier.apply_child(make_child())
    assert writing.kubernetes.calls == calls
    assert writing.failures == ([(Reason.NAME_CONFLICT, CONFLICT)] if is_foreign else [])
    if APPLIED in calls:
        assert writing.kubernetes.find(SERVICES, "tiny-router")["spec"] == {"a": 1}
        # Only this very object may be written: somebody may have put another one in its place.
        (applied,) = writing.kubernetes.applied.values()
        assert applied["metadata"].get("uid") == (next(iter(before.values()))["metadata"]["uid"] if there else None)
    else:
        assert writing.kubernetes.objects == before


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_child_of_a_deleted_cluster_of_this_name_is_waited_for(*, is_listed: bool) -> None:
    writing = Writing(make_child(owner="u0"), is_listed=is_listed)
    with pytest.raises(ConflictError, match="Service tiny-router of the deleted cluster of this name is not gone yet"):
        await writing.applier.apply_child(make_child())
    assert writing.kubernetes.writes == []
    assert writing.failures == []


@pytest.mark.parametrize(
    ("kind", "error", "reason"),
    [
        ("Service", ForbiddenError("no right"), Reason.FORBIDDEN),
        ("Service", InvalidError("spec.x"), Reason.FORBIDDEN),
        ("Deployment", ForbiddenError("no right"), Reason.FORBIDDEN),
        ("Deployment", InvalidError("spec.x"), Reason.POD_TEMPLATE_REFUSED),
        ("Deployment", InvalidError(QUOTA), Reason.QUOTA_EXCEEDED),
        ("Service", ForbiddenError(QUOTA), Reason.QUOTA_EXCEEDED),
        ("Service", BusyError(QUOTA), None),
        ("Service", ConflictError("another one"), None),
    ],
)
async def test_a_refused_write_is_a_failure_and_others_are_tried_again(kind, error, reason) -> None:
    writing = Writing()
    writing.fail(error)
    if reason is None:
        with pytest.raises(type(error)):
            await writing.applier.apply_child(make_child(kind, "tiny-x"))
        assert writing.failures == []
    else:
        await writing.applier.apply_child(make_child(kind, "tiny-x"))
        assert writing.failures == [(reason, f"{kind} tiny-x: {error}")]


async def test_a_write_says_whether_it_was_done() -> None:
    writing = Writing()
    assert await writing.applier.try_write(writing.kubernetes.apply(make_child()), "it") is True
    writing.fail(ForbiddenError("no right"))
    assert await writing.applier.try_write(writing.kubernetes.apply(make_child()), "it") is False


async def test_only_own_children_that_not_every_cluster_has_are_deleted() -> None:
    optional = [
        make_child(kind, f"tiny-{owner}-{number}", owner=owner)
        for kind in (DISRUPTION_BUDGETS.name, CERTIFICATES.name)
        for owner in (UID, "x")
        for number in (1, 2)
    ]
    others = [make_child("Service", "tiny-old"), make_child("ConfigMap", "tiny-old")]
    writing = Writing(*optional, *others)
    kept = {(item["kind"], item["metadata"]["name"]) for item in optional if item["metadata"]["name"].endswith("1")}
    await writing.applier.prune(kept)
    gone = {(kind, f"tiny-{UID}-2") for kind in (DISRUPTION_BUDGETS.name, CERTIFICATES.name)}
    all_ = {key_of(item) for item in (*optional, *others)}
    assert {key_of(item) for item in writing.kubernetes.objects.values()} == all_ - gone
    assert {verb for verb, _ in writing.kubernetes.calls} == {"delete"}
    assert writing.failures == []


async def test_a_child_that_cannot_be_deleted_is_named() -> None:
    writing = Writing(make_child(DISRUPTION_BUDGETS.name, "tiny-engine"), make_child(CERTIFICATES.name, "tiny-front"))
    writing.fail(ForbiddenError("no right"))
    await writing.applier.prune(set())
    assert writing.failures == [
        (Reason.FORBIDDEN, "PodDisruptionBudget tiny-engine: no right"),
        (Reason.FORBIDDEN, "Certificate tiny-front: no right"),
    ]


# --- interceptors

REQUESTS: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "get": ("get", (PODS, "n", "p"), {"a": 1}),
    "get nothing": ("get", (PODS, "n", "p"), None),
    "list": ("list", (PODS, "n", {"l": "v"}), [{"a": 1}]),
    "is_served": ("discover", (PODS,), True),
    "is_served not": ("discover", (PODS,), False),
    "apply": ("apply", ({"kind": "Pod"},), {"a": 1}),
    "create": ("create", ({"kind": "Pod"},), {"a": 1}),
    "patch": ("patch", (CONFIG_MAPS, "n", "m", {"data": {}}), {"a": 1}),
    "patch_status": ("patch_status", (CONFIG_MAPS, "n", "m", {"status": {}}), {"a": 1}),
    "delete": ("delete", (CONFIG_MAPS, "n", "m", "u"), None),
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_each_request_passes_all_interceptors_and_its_answer_comes_back(case: str) -> None:
    verb, arguments, answer = REQUESTS[case]
    heard: list[Any] = []

    class Server:
        def __getattr__(self, name: str) -> Any:
            async def reply(*given: Any) -> Any:
                heard.append((name, given))
                return answer

            return reply

    def make_interceptor(number: int) -> Any:
        async def pass_on(called: str, send: Any) -> Any:
            heard.append((number, called))
            return await send()

        return pass_on

    kubernetes: Any = InterceptedKubernetes(Server(), make_interceptor(1), make_interceptor(2))
    method = case.partition(" ")[0]
    assert await getattr(kubernetes, method)(*arguments) == answer
    assert heard == [(1, verb), (2, verb), (method, arguments)]
