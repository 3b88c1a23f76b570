"""When a scaler looks, searches and asks for a reconcile, second by second, and what its condition says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from children_harness import check

from sluice.v1 import control_pb2
from sluice_operator.api.condition_types import Reason
from sluice_operator.api.sliders import Sliders
from sluice_operator.autoscaling import scaler as scaler_module
from sluice_operator.autoscaling.capacity_messages import CapacityPoint, CapacityResult
from sluice_operator.autoscaling.condition import describe_scale
from sluice_operator.autoscaling.scaler import (
    Scaler,
    ScalerInputs,
    apply_replicas,
    count_least_serving,
    is_older,
)
from sluice_operator.autoscaling.stored_scale import StoredScale
from sluice_operator.autotune.search_process import SearchError

SLIDERS = Sliders(num_prefill_heavy=1, prefill_heavy_tokens=512, decode_heavy_tokens=64)
CAPACITY = CapacityResult(
    points=tuple(CapacityPoint(replicas=size, goodput_rps=2.0 * size, sliders=SLIDERS) for size in (1, 2, 4))
)


class PlayedRequest:
    """A request for a search that differs from others as the test says."""

    def __init__(self, name: str, *, differs: bool = False, has_shifted: bool = False, may_tune: bool = True) -> None:
        self.name, self.may_tune = name, may_tune
        self._differs, self._has_shifted = differs, has_shifted

    def differs(self, other: PlayedRequest) -> bool:
        return other._differs

    def has_shifted(self, other: PlayedRequest) -> bool:
        return other._has_shifted


SAME, OTHER, SHIFTED = (
    PlayedRequest("same"),
    PlayedRequest("other", differs=True),
    PlayedRequest("shifted", has_shifted=True),
)


class Scaling:
    """A scaler whose clock, requests and searches the test plays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.request: PlayedRequest | None = SAME
        self.missing: tuple[Reason, str] | None = None
        self.searched: list[str] = []
        self.cancelled: list[str] = []
        self.ends: asyncio.Queue[CapacityResult | Exception] = asyncio.Queue()
        self.num_enqueued = 0
        self.scaler = Scaler(self.search, enqueue=self.enqueue, now=lambda: self.now)
        monkeypatch.setattr(self.scaler, "_make_request", lambda _inputs: (self.request, self.missing))

    def enqueue(self) -> None:
        self.num_enqueued += 1

    async def search(self, request: Any) -> CapacityResult:
        self.searched.append(request.name)
        try:
            ended = await self.ends.get()
        except asyncio.CancelledError:
            self.cancelled.append(request.name)
            raise
        if isinstance(ended, Exception):
            raise ended
        return ended

    def update(self, *statuses: control_pb2.GetStatusResponse, replicas: int = 2, **fields: Any) -> int:
        scaling = {"mode": "Apply", "minReplicas": 1, "maxReplicas": 8, **fields.pop("autoscaling", {})}
        cluster = check(replicas=replicas, prefillHeavy="50%", autoscaling=scaling)
        return self.scaler.update(ScalerInputs(cluster=cluster, statuses=list(statuses), **fields))

    async def search_if_due(self) -> bool:
        """Whether a search begins now."""
        before = len(self.searched)
        self.scaler.search_if_due()
        await asyncio.sleep(0)
        return len(self.searched) > before

    async def end(self, result: CapacityResult | Exception = CAPACITY, took_s: float = 1.0) -> None:
        self.now += took_s
        self.ends.put_nowait(result)
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Scaling:
    return Scaling(monkeypatch)


async def test_a_search_begins_once_and_its_end_asks_for_a_reconcile(scaling: Scaling) -> None:
    assert not await scaling.search_if_due(), "nothing is known of the cluster"
    scaling.update()
    assert await scaling.search_if_due()
    assert not await scaling.search_if_due()
    assert (scaling.num_enqueued, scaling.scaler.capacity, scaling.scaler.find_sliders(2)) == (0, None, None)
    await scaling.end()
    assert (scaling.num_enqueued, scaling.scaler.capacity) == (1, CAPACITY)
    assert scaling.scaler.stored is not None
    assert scaling.scaler.stored.capacity == CAPACITY
    assert scaling.scaler.find_sliders(2) == SLIDERS


async def test_sliders_that_a_search_measured_and_may_not_change_are_not_put_in_force(scaling: Scaling) -> None:
    scaling.request = PlayedRequest("fixed", may_tune=False)
    scaling.update()
    await scaling.search_if_due()
    await scaling.end()
    assert scaling.scaler.capacity == CAPACITY
    assert scaling.scaler.find_sliders(2) is None


async def test_another_request_ends_the_search_under_way_and_none_leaves_it_alone(scaling: Scaling) -> None:
    scaling.update()
    assert await scaling.search_if_due()
    scaling.request = SHIFTED
    assert not await scaling.search_if_due()
    scaling.request = None
    assert not await scaling.search_if_due()
    scaling.request = OTHER
    assert await scaling.search_if_due()
    await scaling.end()
    assert scaling.searched == ["same", "other"]
    assert scaling.num_enqueued == 1, "the first one was ended"


@pytest.mark.parametrize(("took_s", "rest_s"), [(1.0, 5.0), (5.0, 5.0), (20.0, 20.0), (500.0, 60.0)])
async def test_after_a_search_comes_a_rest_as_long_as_it_took(scaling: Scaling, took_s: float, rest_s: float) -> None:
    scaling.update()
    await scaling.search_if_due()
    await scaling.end(took_s=took_s)
    scaling.request = SHIFTED
    scaling.now += rest_s - 0.25
    assert not await scaling.search_if_due()
    scaling.now += 0.25
    scaling.request = SAME
    assert not await scaling.search_if_due(), "nothing has changed"
    scaling.request = SHIFTED
    assert await scaling.search_if_due()
    await scaling.end()
    scaling.request = OTHER
    assert await scaling.search_if_due(), "another spec does not wait"
    scaling.scaler.stop()


@pytest.mark.parametrize(
    ("error", "message"),
    [(SearchError("too slow"), "too slow"), (ValueError("a mistake"), "the search failed: a mistake")],
)
async def test_a_search_that_failed_is_said_and_repeated_after_a_pause(
    scaling: Scaling, caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    scaling.update()
    await scaling.search_if_due()
    await scaling.end(CAPACITY)
    scaling.request = SHIFTED
    scaling.now += 60.0
    await scaling.search_if_due()
    await scaling.end(error)
    # A fault of our own leaves its trace.
    assert [bool(record.exc_info) for record in caplog.records] == [True] * isinstance(error, ValueError)
    assert (scaling.num_enqueued, scaling.scaler.capacity) == (2, CAPACITY)
    status = scaling.scaler.describe_status()
    assert status is not None
    assert (status.is_true, status.reason, status.message) == (False, Reason.SEARCH_FAILED, message)
    assert scaling.scaler.find_sliders(2) is None
    scaling.now += 59.75
    assert not await scaling.search_if_due()
    scaling.now += 0.25
    scaling.request = SAME
    assert await scaling.search_if_due()
    await scaling.end()
    assert scaling.scaler.describe_status() != status
    assert scaling.scaler.find_sliders(2) == SLIDERS


async def test_between_reconciles_it_looks_every_so_often_and_says_when_one_is_needed(scaling: Scaling) -> None:
    busy = control_pb2.GetStatusResponse(router_id="r", num_requests=3, num_arrived=3)
    assert not scaling.scaler.watch([busy])
    scaling.update(busy, stored=StoredScale(basis=2, replicas=2, capacity=CAPACITY))
    scaling.now += 1.75
    assert not scaling.scaler.watch([busy])
    scaling.now += 0.25
    assert scaling.scaler.watch([busy]), "a search is due"
    await scaling.search_if_due()
    scaling.now += 2.0
    assert not scaling.scaler.watch([busy]), "it is under way"
    scaling.now += 2.0
    scaling.missing = (Reason.NO_SAMPLE, "too few")
    scaling.request = None
    assert not scaling.scaler.watch([busy]), "what is missing is no news while a search has found something"
    waiting = control_pb2.GetStatusResponse(router_id="r", num_requests=300, num_waiting=300, num_arrived=3)
    scaling.now += 1.75
    assert not scaling.scaler.watch([waiting])
    scaling.now += 0.25
    assert scaling.scaler.watch([waiting]), "another number is wanted"
    assert scaling.scaler.stored is not None
    assert scaling.scaler.stored.replicas > 2
    scaling.scaler.stop()


async def test_a_search_for_another_spec_ends_the_one_under_way(scaling: Scaling) -> None:
    scaling.update()
    assert await scaling.search_if_due()
    scaling.request = OTHER
    assert await scaling.search_if_due()
    assert (scaling.searched, scaling.cancelled) == (["same", "other"], ["same"])
    scaling.scaler.stop()


async def test_another_reason_for_no_search_is_news_between_reconciles(scaling: Scaling) -> None:
    quiet = control_pb2.GetStatusResponse(router_id="r")
    scaling.request, scaling.missing = None, (Reason.NO_SAMPLE, "too few")
    scaling.update()
    assert not await scaling.search_if_due()
    scaling.now += 2.0
    assert not scaling.scaler.watch([quiet])
    scaling.now += 2.0
    scaling.missing = (Reason.NO_LATENCY_MODEL, "unknown")
    assert scaling.scaler.watch([quiet])
    status = scaling.scaler.describe_status()
    assert status is not None
    assert (status.reason, status.message) == scaling.missing


async def test_the_first_request_of_a_cluster_of_none_does_not_wait_for_the_next_look(scaling: Scaling) -> None:
    scaling.update(stored=StoredScale(basis=2, replicas=0), autoscaling={"minReplicas": 0})
    scaling.request = None
    quiet = control_pb2.GetStatusResponse(router_id="r")
    assert not scaling.scaler.watch([quiet])
    assert scaling.scaler.watch([quiet, control_pb2.GetStatusResponse(router_id="s", num_requests=1)])
    assert scaling.scaler.stored is not None
    assert scaling.scaler.stored.replicas == 1


async def test_more_than_the_most_engines_serve_is_said_for_a_while(scaling: Scaling) -> None:
    stored = StoredScale(basis=2, replicas=2, capacity=CAPACITY)
    # 30 s of backlog at two requests a second of each of eight engines.
    for num_waiting, reason in ((480, Reason.SIZED), (481, Reason.AT_MAXIMUM)):
        status = control_pb2.GetStatusResponse(router_id="r", num_requests=num_waiting, num_waiting=num_waiting)
        scaling.update(status, stored=stored)
        found = scaling.scaler.describe_status()
        assert found is not None
        assert found.reason is reason
    for later_s, reason in ((59.75, Reason.AT_MAXIMUM), (0.25, Reason.SIZED)):
        scaling.now += later_s
        found = scaling.scaler.describe_status()
        assert found is not None
        assert found.reason is reason


async def test_disabling_forgets_what_was_decided_and_not_what_serves(scaling: Scaling) -> None:
    assert scaling.scaler.describe_status() is None
    scaling.update()
    await scaling.search_if_due()
    await scaling.end(SearchError("too slow"))
    cluster = check(replicas=5)
    assert scaling.scaler.update(ScalerInputs(cluster=cluster, statuses=[])) == 5
    assert scaling.scaler.stored is None
    status = scaling.scaler.describe_status()
    assert status is not None
    assert (status.is_true, status.reason, status.message) == (False, Reason.OFF, "autoscaling is disabled")
    assert not scaling.scaler.watch([])
    assert not await scaling.search_if_due()
    # Enabled again it searches at once, whatever failed before.
    scaling.update(replicas=5)
    assert await scaling.search_if_due()
    status = scaling.scaler.describe_status()
    assert status is not None
    assert status.reason is Reason.SEARCHING
    scaling.scaler.stop()


@pytest.mark.parametrize(
    ("stored", "number", "basis", "start_s", "capacity"),
    [
        (None, 4, 4, 120.0, None),
        (StoredScale(basis=4, replicas=3, start_s=50.0, capacity=CAPACITY, reason="r"), 3, 4, 50.0, CAPACITY),
        (StoredScale(basis=2, replicas=3, start_s=50.0, capacity=CAPACITY, reason="r"), 4, 4, 50.0, CAPACITY),
    ],
    ids=["nothing", "of this spec", "of another number"],
)
async def test_a_scaler_goes_on_with_what_is_stored_for_this_number(
    scaling: Scaling, stored, number, basis, start_s, capacity
) -> None:
    busy = control_pb2.GetStatusResponse(router_id="r", num_requests=3)
    assert scaling.update(busy, replicas=4, stored=stored) == number
    kept = scaling.scaler.stored
    assert kept is not None
    assert (kept.basis, kept.replicas, kept.start_s, kept.capacity) == (basis, number, start_s, capacity)
    # Its own counts more than what was stored since.
    assert scaling.update(busy, replicas=4, stored=StoredScale(basis=4, replicas=7)) == number


async def test_recommendations_change_nothing(scaling: Scaling) -> None:
    stored = StoredScale(basis=4, replicas=3)
    assert scaling.update(replicas=4, stored=stored, autoscaling={"mode": "Recommend"}) == 4
    assert scaling.scaler.stored is not None
    assert scaling.scaler.stored.replicas == 3


OVER = "more arrives than maxReplicas, 8, serve; raise it"


@pytest.mark.parametrize(
    ("given", "is_true", "reason", "message"),
    [
        ({"failure": "too slow", "replicas": 0}, False, Reason.SEARCH_FAILED, "too slow"),
        ({"replicas": 0}, True, Reason.IDLE, "no engine is wanted until a request arrives"),
        ({"capacity": None}, False, Reason.SEARCHING, "a search for what engines serve runs"),
        ({"capacity": None, "missing": (Reason.NO_SAMPLE, "too few")}, False, Reason.NO_SAMPLE, "too few"),
        ({"missing": (Reason.NO_SAMPLE, "too few")}, True, Reason.SIZED, "3 engines are wanted, and asked for"),
        ({"is_over": True}, False, Reason.AT_MAXIMUM, OVER),
        ({"is_over": True, "capacity": None}, False, Reason.SEARCHING, "a search for what engines serve runs"),
        (
            {"mode": "Recommend"},
            False,
            Reason.RECOMMENDED,
            "3 engines are wanted; put them into spec.replicas, or set autoscaling.mode: Apply",
        ),
        ({"mode": "Recommend", "replicas": 4}, True, Reason.SIZED, "4 engines are wanted, and asked for"),
        ({"mode": "Recommend", "is_over": True}, False, Reason.AT_MAXIMUM, OVER),
    ],
)
def test_the_condition_says_the_first_thing_that_matters(
    given: dict[str, Any], reason: Reason, message: str, *, is_true: bool
) -> None:
    values = {"mode": "Apply", "replicas": 3, "capacity": CAPACITY, "is_over": False, "failure": "", "missing": None}
    values |= given
    spec = check(replicas=4, prefillHeavy="50%", autoscaling={"mode": values["mode"], "maxReplicas": 8}).spec
    scale = StoredScale(basis=4, replicas=values["replicas"], capacity=values["capacity"])
    rest = {name: values[name] for name in ("is_over", "failure", "missing")}
    found = describe_scale(spec, scale, **rest)
    assert (found.is_true, found.reason, found.message) == (is_true, reason, message)


def test_what_a_search_needs_is_said_in_the_order_in_which_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = Scaler(None, enqueue=lambda: None, now=lambda: 0.0)
    older = control_pb2.GetStatusResponse(classes=[control_pb2.ClassCounters(num_finished=1)])
    cluster = check(replicas=2, prefillHeavy="50%", autoscaling={"mode": "Apply", "maxReplicas": 5})
    made: list[Any] = []
    monkeypatch.setattr(scaler_module, "make_capacity_request", lambda *given: made.append(given) or "a request")
    monkeypatch.setattr(scaler_module, "read_workload", lambda statuses: "a workload" if len(statuses) == 2 else None)
    facts: list[Any] = [(None, "no profile yet"), ("facts", "")]
    monkeypatch.setattr(scaler_module, "find_engine_facts", lambda _spec, _statuses: facts.pop(0))

    def make(*statuses: control_pb2.GetStatusResponse) -> Any:
        return scaler._make_request(ScalerInputs(cluster=cluster, statuses=statuses))

    status = control_pb2.GetStatusResponse()
    request, missing = make(status, older)
    assert (request, missing[0]) == (None, Reason.NO_SAMPLE)
    assert "older than the operator" in missing[1]
    request, missing = make(status)
    assert (request, missing[0]) == (None, Reason.NO_SAMPLE)
    assert "fewer than" in missing[1]
    assert make(status, status) == (None, (Reason.NO_LATENCY_MODEL, "no profile yet"))
    assert make(status, status) == ("a request", None)
    ((spec, sizes, _find, workload, engine),) = made
    assert (spec, sizes, workload, engine) == (cluster.spec, (1, 2, 4, 5), "a workload", "facts")


@pytest.mark.parametrize(
    ("arrived", "finished", "verdict"), [(0, 0, False), (0, 1, True), (1, 1, False), (1, 0, False)]
)
def test_a_router_that_finished_requests_and_counts_none_is_older(
    arrived: int, finished: int, *, verdict: bool
) -> None:
    classes = [control_pb2.ClassCounters(), control_pb2.ClassCounters(num_finished=finished)]
    assert is_older(control_pb2.GetStatusResponse(num_arrived=arrived, classes=classes)) is verdict


async def test_while_an_older_router_runs_the_number_stays(scaling: Scaling) -> None:
    older = control_pb2.GetStatusResponse(classes=[control_pb2.ClassCounters(num_finished=1)], num_waiting=900)
    other = control_pb2.GetStatusResponse(num_arrived=9, num_requests=900, num_waiting=900)
    stored = StoredScale(basis=2, replicas=2, capacity=CAPACITY)
    assert scaling.update(other, older, stored=stored) == 2
    assert scaling.update(other, stored=stored) > 2


def test_engines_of_two_kinds_serve_from_two_on() -> None:
    assert count_least_serving(check(replicas=2).spec) == 1
    assert count_least_serving(check(replicas=2, strategy="Disaggregated").spec) == 2
    cluster = check(replicas=3)
    assert apply_replicas(cluster, 3) is cluster
    assert apply_replicas(cluster, 5).spec == cluster.spec.model_copy(update={"replicas": 5})
    assert cluster.spec.replicas == 3
