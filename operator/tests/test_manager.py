"""What stands around the reconciler: settings, keys from events, probes, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import threading
import time
from collections import Counter
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from fake_kubernetes import FakeKubernetes, make_cluster
from kopf._core.actions.invocation import invoke
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from sluice.certificates import CertificateError
from sluice_operator import __main__ as program
from sluice_operator.__main__ import find_cause
from sluice_operator.api.names import ClusterKey
from sluice_operator.controller import informer as informer_module
from sluice_operator.controller import manager
from sluice_operator.controller.informer import Informer, find_key, make_settings
from sluice_operator.controller.manager import Operator, StoppedError
from sluice_operator.health import MAX_QUEUE_AGE_S, Health
from sluice_operator.kubernetes.errors import BusyError, ForbiddenError, LeaseLostError
from sluice_operator.kubernetes.kinds import CLUSTERS, DEPLOYMENTS, NODES
from sluice_operator.kubernetes.rbac import WATCHED
from sluice_operator.logs import ObjectFilter, current_object, make_formatter
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.settings import OperatorSettings, parse_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

KEY = ClusterKey("default", "tiny")


def test_settings_come_from_the_command_line_and_then_from_the_environment() -> None:
    environment = {"SLUICE_OPERATOR_WATCH_NAMESPACES": "a, b", "SLUICE_OPERATOR_IDENTITY": "pod-1"}
    settings = parse_settings(["--workers", "3", "--identity", "pod-2"], environment)
    assert (settings.workers, settings.identity, settings.namespaces) == (3, "pod-2", ("a", "b"))
    assert parse_settings([], {}).namespaces == ()


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--request-timeout-s", "6"]], ids=["workers", "timeout"])
def test_settings_out_of_bounds_are_refused(arguments) -> None:
    # A longer request could outlive the lease.
    with pytest.raises(ValueError):
        parse_settings(arguments, {})


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"kind": "ServingCluster", "metadata": {"name": "c", "namespace": "n"}}, ClusterKey("n", "c")),
        (
            {"kind": "Pod", "metadata": {"name": "p", "namespace": "n", "labels": {"sluice.dev/cluster": "c"}}},
            ClusterKey("n", "c"),
        ),
        ({"kind": "Pod", "metadata": {"name": "p", "namespace": "n"}}, None),
    ],
    ids=["cluster", "child", "stranger"],
)
def test_every_event_of_a_cluster_or_its_children_enqueues_it(body, key) -> None:
    keys: list[ClusterKey] = []
    informer = Informer(handle_event=lambda key, _: keys.append(key), now=lambda: 5.0)
    informer.take(body)
    assert keys == ([key] if key else [])
    assert find_key(body) == key
    assert informer.last_event_s == 5.0


async def test_events_are_taken_on_the_event_loop() -> None:
    """The queue that they go to is not made for threads."""
    taken: list[tuple[ClusterKey, threading.Thread]] = []
    informer = Informer(handle_event=lambda key, _: taken.append((key, threading.current_thread())), now=lambda: 5.0)
    handlers = informer._make_registry()._watching.get_all_handlers()
    assert len(handlers) == len(WATCHED)
    body = {"kind": "ServingCluster", "metadata": {"name": "c", "namespace": "n"}}
    for handler in handlers:
        await invoke(handler.fn, kwargs={"body": body, "type": "ADDED"})
    assert taken == [(ClusterKey("n", "c"), threading.current_thread())] * len(WATCHED)


@pytest.mark.parametrize("namespaces", [(), ("a", "b")])
async def test_the_watches_are_kopf_s_in_the_namespaces_asked_for(monkeypatch: pytest.MonkeyPatch, namespaces) -> None:
    asked: list[dict[str, Any]] = []

    async def run(**arguments: Any) -> None:
        asked.append(arguments)

    monkeypatch.setattr(informer_module.kopf, "operator", run)
    informer = Informer(handle_event=lambda *_: None, now=lambda: 5.0)
    is_ready = asyncio.Event()
    await informer.run(list(namespaces), is_ready)
    (given,) = asked
    registry, settings = given.pop("registry"), given.pop("settings")
    assert given == {
        "standalone": True,
        "clusterwide": not namespaces,
        "namespaces": namespaces,
        "ready_flag": is_ready,
    }
    assert len(registry._watching.get_all_handlers()) == len(WATCHED)
    assert settings.watching.label_selectors == make_settings().watching.label_selectors


@pytest.mark.parametrize("is_in_pod", [True, False])
def test_a_watch_logs_in_as_the_pod_or_else_by_the_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, *, is_in_pod: bool
) -> None:
    informer = Informer(handle_event=lambda *_: None, now=lambda: 5.0)
    (login,) = informer._make_registry()._activities.get_all_handlers()
    kopf = informer_module.kopf
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **given: ("pod", given) if is_in_pod else None)
    monkeypatch.setattr(kopf, "login_with_kubeconfig", lambda **given: ("kubeconfig", given))
    assert login.fn(logger="l") == ("pod" if is_in_pod else "kubeconfig", {"logger": "l"})


async def test_nodes_are_watched_where_somebody_takes_them() -> None:
    taken: list[tuple[str, str | None]] = []
    informer = Informer(handle_event=lambda *_: None, now=lambda: 5.0)
    informer.handle_node = lambda body, kind: taken.append((body["metadata"]["name"], kind))
    handlers = informer._make_registry()._watching.get_all_handlers()
    assert len(handlers) == len(WATCHED) + 1
    for kind in (None, "MODIFIED", "DELETED"):
        await invoke(handlers[-1].fn, kwargs={"body": {"kind": NODES.name, "metadata": {"name": "n"}}, "type": kind})
    assert taken == [("n", None), ("n", "MODIFIED"), ("n", "DELETED")]


def test_only_objects_of_ours_are_watched_and_nothing_is_written() -> None:
    settings = make_settings()
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    # A watch that says nothing for longer than the server's bookmarks take is opened again.
    assert 60.0 < settings.watching.inactivity_timeout <= 90.0
    assert len(settings.watching.label_selectors) == len(WATCHED) - 1
    assert set(settings.watching.label_selectors.values()) == {"app.kubernetes.io/managed-by=sluice-operator"}
    assert CLUSTERS in WATCHED


async def test_probes_and_metrics_are_served() -> None:
    metrics, age_s, is_ready = OperatorMetrics(), 0.0, False
    health = Health(metrics, refresh=lambda: age_s, is_ready=lambda: is_ready, now=lambda: 0.0)
    task = asyncio.create_task(health.run("127.0.0.1", 0))
    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(10):
            await health.started.wait()

        async def get(path: str) -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{health.port}{path}") as answer:
                return answer.status, await answer.text()

        assert (await get("/livez"))[0] == 200
        assert (await get("/readyz"))[0] == 503
        is_ready = True
        assert (await get("/readyz"))[0] == 200
        metrics.record_call("apply", "deployments", 200, 0.004)
        text = (await get("/metrics"))[1]
        assert 'sluice_operator_api_calls_total{resource="deployments",status="200",verb="apply"} 1.0' in text
        assert (await get("/else"))[0] == 404
        age_s = MAX_QUEUE_AGE_S + 1
        status, text = await get("/livez")
        assert status == 500
        assert "due or in work for" in text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_logs_are_json_and_name_the_object() -> None:
    record = logging.LogRecord("l", logging.INFO, "f", 1, "hello %s", ("you",), None)
    token = current_object.set("n/c")
    assert ObjectFilter().filter(record)
    current_object.reset(token)
    line = json.loads(make_formatter().format(record))
    assert {name: line[name] for name in ("level", "logger", "object", "message")} == {
        "level": "INFO",
        "logger": "l",
        "object": "n/c",
        "message": "hello you",
    }
    assert "time" in line


def test_the_first_cause_is_found_in_nested_task_groups() -> None:
    lost, after, last = (LeaseLostError(name) for name in ("pod-1 no longer leads", "after it", "last"))
    assert find_cause(ExceptionGroup("outer", [ExceptionGroup("inner", [lost, after]), last])) is lost


async def test_resync_enqueues_every_known_cluster() -> None:
    async with ApiClient(Configuration()) as api:
        operator = Operator(OperatorSettings(resync_s=0.02), api)
        keys = {ClusterKey("n", name) for name in "abc"}
        for key in keys:
            operator._informer.take({"kind": "ServingCluster", "metadata": {"name": key.name, "namespace": "n"}})
        # The events themselves; after them the watch is silent.
        for _ in keys:
            operator._queue.finish(await operator._queue.get())
        resync = asyncio.create_task(operator._resync())
        async with asyncio.timeout(10):
            assert {await operator._queue.get() for _ in keys} == keys
        resync.cancel()


class NotedQueue:
    """Notes what is enqueued, and how soon."""

    def __init__(self) -> None:
        self.added: list[tuple[ClusterKey, float]] = []

    def add(self, key: ClusterKey, after_s: float = 0.0) -> None:
        self.added.append((key, after_s))


async def test_a_resync_is_spread_over_the_last_quarter_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        if len(slept_s) == 3:
            raise StoppedError

    async with ApiClient(Configuration()) as api:
        operator = Operator(OperatorSettings(resync_s=100.0), api)
        operator._queue = NotedQueue()
        operator._known_keys = {ClusterKey("n", str(number)) for number in range(200)}
        monkeypatch.setattr(manager.asyncio, "sleep", sleep)
        with pytest.raises(StoppedError):
            await operator._resync()
    assert slept_s == [75.0, 75.0, 75.0]
    assert Counter(key for key, _ in operator._queue.added) == dict.fromkeys(operator._known_keys, 2)
    pauses_s = sorted(pause_s for _, pause_s in operator._queue.added)
    assert 0.0 <= pauses_s[0] < 2.0
    assert 23.0 < pauses_s[-1] <= 25.0


async def test_a_process_waits_for_the_api_server_and_ends_without_the_crd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it kopf would sit idle."""
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    class Server:
        def __init__(self) -> None:
            self.answers: list[object] = [BusyError("503"), BusyError("503"), True]
            self.kinds: list[object] = []

        async def is_served(self, kind: object) -> bool:
            self.kinds.append(kind)
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

    monkeypatch.setattr(manager.asyncio, "sleep", sleep)
    async with ApiClient(Configuration()) as api:
        operator = Operator(OperatorSettings(), api)
        operator._kubernetes = server = Server()
        await operator._wait_for_crd()
        assert (slept_s, server.kinds) == ([1.0, 1.0], [CLUSTERS] * 3)
        server.answers = [False]
        with pytest.raises(SystemExit, match=r"no CRD servingclusters\.sluice\.dev"):
            await operator._wait_for_crd()


async def test_the_gauges_say_what_the_process_holds() -> None:
    async with ApiClient(Configuration()) as api:
        operator = Operator(OperatorSettings(), api)
        metrics = operator._metrics
        gauges = {
            "queue": metrics.queue,
            "leader": metrics.leader,
            "clusters": metrics.clusters,
            "connections": metrics.router_connections,
            "event age": metrics.event_age_s,
        }

        def read() -> dict[str, float]:
            assert operator._refresh() == metrics.queue_age_s._value.get()
            return {name: gauge._value.get() for name, gauge in gauges.items()}

        assert read() == dict.fromkeys(gauges, 0.0)
        for name in "abc":
            operator._handle_event(ClusterKey("n", name), {"kind": CLUSTERS.name, "metadata": {}})
        assert await operator._queue.get()
        operator._elector = StandInElector()
        operator._connections = SimpleNamespace(count=lambda: 7)
        operator._informer.last_event_s = time.monotonic() - 50.0
        found = read()
        assert found.pop("event age") == pytest.approx(50.0, abs=20.0)
        assert found == {"queue": 2.0, "leader": 1.0, "clusters": 3.0, "connections": 7.0}
        assert metrics.queue_age_s._value.get() > 0.0


async def test_requests_end_by_their_time_limit_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never_answer(*_: object) -> None:
        await asyncio.Event().wait()

    async with ApiClient(Configuration()) as api, asyncio.timeout(4):
        monkeypatch.setattr(api, "call_api", never_answer)
        operator = Operator(OperatorSettings(request_timeout_s=0.01), api)
        with pytest.raises(BusyError, match="no answer"):
            await operator._kubernetes.get(CLUSTERS, "n", "c")
    assert operator._metrics.calls.labels("get", CLUSTERS.plural, "0")._value.get() == 1


async def test_the_lease_is_of_the_settings_with_times_in_microseconds() -> None:
    """Kubernetes refuses times of a Lease without them."""
    async with ApiClient(Configuration()) as api:
        elector = Operator(OperatorSettings(namespace="n", lease_name="l", identity="pod-1"), api)._elector
    lease = elector._render()
    assert lease["metadata"] == {"namespace": "n", "name": "l"}
    assert lease["spec"]["holderIdentity"] == "pod-1"
    assert re.fullmatch(r"[0-9-]{10}T[0-9:]{8}[.][0-9]{6}Z", lease["spec"]["renewTime"])


# The process as a whole.


class StandInElector:
    """Leads while it is told to."""

    def __init__(self, *, is_leading: bool = True) -> None:
        self.is_leading = is_leading
        self.is_connected = True
        self.is_released = False

    async def acquire(self) -> None:
        return

    async def renew(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        self.is_released = True


class StandInInformer:
    """Finds one cluster, and nothing afterwards."""

    last_event_s = 0.0
    handle_node = None

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    async def run(self, _namespaces: object, is_ready: asyncio.Event) -> None:
        self.operator._handle_event(KEY, {"kind": CLUSTERS.name, "metadata": {}})
        is_ready.set()
        await asyncio.Event().wait()


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    """The operator on an API server in memory, which holds one cluster."""
    async with ApiClient(Configuration()) as api:
        made = Operator(OperatorSettings(host="127.0.0.1", port=0, workers=1), api)
        made._kubernetes = FakeKubernetes()
        made._kubernetes.put(make_cluster())
        made._elector, made._informer = StandInElector(), StandInInformer(made)
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_cluster_is_reconciled_until_a_signal_comes_and_the_lease_is_given_back(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    kubernetes = operator._kubernetes
    handlers: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", handlers.__setitem__)

    def stop(verb: str, plural: str) -> None:
        if (verb, plural) == ("patch_status", "servingclusters"):
            handlers.get(number, operator._stop.set)()

    kubernetes.after = stop
    async with asyncio.timeout(20):
        await operator.run()
    assert number in handlers
    assert {item["metadata"]["name"] for item in kubernetes.select(DEPLOYMENTS)} == {"tiny-engine", "tiny-router"}
    assert operator._elector.is_released


@pytest.mark.parametrize("error", [None, ForbiddenError("403"), BusyError("503")], ids=["read", "forbidden", "busy"])
async def test_nodes_are_read_before_the_first_reconcile(
    operator: Operator, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    operator._settings = operator._settings.model_copy(update={"watch_nodes": True})
    kubernetes = operator._kubernetes
    cordoned = {"apiVersion": "v1", "kind": NODES.name, "metadata": {"name": "n1", "namespace": ""}}
    kubernetes.put({**cordoned, "spec": {"unschedulable": True}})
    calls: list[tuple[str, str]] = []

    def fail(verb: str, plural: str) -> None:
        calls.append((verb, plural))
        if plural == NODES.plural and error is not None:
            raise error

    def stop(verb: str, plural: str) -> None:
        if (verb, plural) == ("patch_status", "servingclusters"):
            operator._stop.set()

    kubernetes.before, kubernetes.after = fail, stop
    async with asyncio.timeout(20):
        await operator.run()
    assert calls[:2] == [("discover", "servingclusters"), ("list", "nodes")]
    assert (operator._notices.find("n1") is not None) == (error is None)
    # Without the right, nodes are not watched; everything else goes on.
    assert (operator._informer.handle_node is None) == isinstance(error, ForbiddenError)
    assert ("nodes" in caplog.text) == (error is not None)
    if error is None:
        operator._queue.finish(KEY)
        operator._handle_event(KEY, {"kind": "Pod", "metadata": {}, "spec": {"nodeName": "n1"}})
        while len(operator._queue):
            operator._queue.finish(await operator._queue.get())
        operator._informer.handle_node({**cordoned, "spec": {"unschedulable": True}}, "MODIFIED")
        assert len(operator._queue) == 0, "it said so before"
        operator._informer.handle_node({**cordoned, "spec": {"unschedulable": True}}, "DELETED")
        assert len(operator._queue) == 1


async def test_a_process_without_the_lease_writes_nothing_and_ends(operator: Operator) -> None:
    operator._elector.is_leading = False
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as ended:
            await operator.run()
    assert isinstance(find_cause(ended.value), LeaseLostError)
    assert operator._kubernetes.writes == []


async def test_a_write_that_failed_is_not_repeated_once_the_lease_is_lost(operator: Operator) -> None:
    def lose(verb: str, _plural: str) -> None:
        # The first write is a create, which is never repeated.
        if verb == "apply":
            operator._elector.is_leading = False
            raise BusyError("503")

    operator._kubernetes.before = lose
    async with asyncio.timeout(20):
        with pytest.raises(ExceptionGroup) as ended:
            await operator.run()
    assert isinstance(find_cause(ended.value), LeaseLostError)
    assert [verb for verb, _ in operator._kubernetes.writes] == ["create", "apply"]


async def test_a_read_that_failed_once_is_repeated_within_the_reconcile(operator: Operator) -> None:
    num_lists = 0

    def refuse_once(verb: str, plural: str) -> None:
        nonlocal num_lists
        if (verb, plural) == ("list", "pods"):
            num_lists += 1
            if num_lists == 1:
                raise BusyError("503")
        if verb == "patch_status":
            operator._stop.set()

    operator._kubernetes.before = refuse_once
    async with asyncio.timeout(20):
        await operator.run()
    outcomes = {sample.labels["outcome"] for sample in operator._metrics.reconciles.collect()[0].samples}
    assert (num_lists, "BusyError" in outcomes) == (2, False)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_cluster_that_is_gone_is_forgotten(operator: Operator, *, is_known: bool) -> None:
    class StandInReconciler:
        async def reconcile(self, _key: ClusterKey) -> None:
            return None

        def is_known(self, key: ClusterKey) -> bool:
            assert key == KEY
            return is_known

    operator._handle_event(KEY, {"kind": CLUSTERS.name, "metadata": {}})
    await operator._reconcile(StandInReconciler(), await operator._queue.get())
    assert operator._known_keys == ({KEY} if is_known else set())
    (took_s,) = [
        sample.value
        for sample in operator._metrics.reconcile_s.collect()[0].samples
        if sample.name.endswith("_seconds_sum")
    ]
    assert 0.0 < took_s < 60.0


async def test_a_lost_lease_ends_the_worker_and_its_key_is_not_finished(operator: Operator) -> None:
    class StandInReconciler:
        async def reconcile(self, key: ClusterKey) -> None:
            assert current_object.get() == str(key)
            raise LeaseLostError("pod-1 no longer leads")

    operator._queue.add(KEY)
    with pytest.raises(LeaseLostError):
        await operator._run_worker(StandInReconciler())
    assert current_object.get() != str(KEY)
    assert operator._queue.is_processing(KEY)


@pytest.mark.parametrize("has_certificate", [True, False])
async def test_a_leader_shares_clock_filter_and_metrics_with_its_reconciler(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, *, has_certificate: bool
) -> None:
    """What one of them learns another one acts on."""
    made: dict[str, object] = {}

    def make_reconciler(kubernetes: object, connections: object, settings: object, **arguments: object) -> object:
        made.update(kubernetes=kubernetes, connections=connections, settings=settings, **arguments)
        return SimpleNamespace(record_status=lambda key, status: made.update(status=(key, status)))

    def make_connections(group: asyncio.TaskGroup, **arguments: Any) -> object:
        made.update(group=group, given=arguments)
        return SimpleNamespace(count=lambda: 0)

    monkeypatch.setattr(manager, "Reconciler", make_reconciler)
    monkeypatch.setattr(manager, "RouterConnections", make_connections)
    names: set[str] = set()

    async def run(namespaces: object, is_watching: object) -> None:
        made.update(namespaces=namespaces, is_watching=is_watching)
        names.update(task.get_name() for task in asyncio.all_tasks())
        await asyncio.sleep(0)

    operator._settings = operator._settings.model_copy(update={"workers": 3, "watch_namespaces": "a,b"})
    operator._informer.run = run
    certificates = operator._certificates = SimpleNamespace(refresh="refresh") if has_certificate else None

    async def keep_fresh(refreshes: object) -> None:
        made.update(refreshes=refreshes)

    monkeypatch.setattr(manager, "keep_fresh", keep_fresh)
    with pytest.raises(ExceptionGroup) as ended:
        await operator._elect_and_lead()
    assert isinstance(find_cause(ended.value), StoppedError)
    assert (made["settings"], made["namespaces"]) == (operator._settings, ("a", "b"))
    assert made["is_watching"] is operator._is_watching
    assert made["connections"] is operator._connections
    assert names >= {"renew the lease", "worker 0", "worker 1", "worker 2", "resync"}
    assert made.get("refreshes") == (["refresh"] if has_certificate else None)
    given = made["given"]
    assert isinstance(given, dict)
    assert given["certificates"] is certificates
    assert made["enqueue"] == operator._queue.add
    operator._queue = NotedQueue()
    given["enqueue"](KEY)
    ((key, pause_s),) = operator._queue.added
    # An edit is in force in about a second.
    assert (key, pause_s) == (KEY, pytest.approx(0.15, abs=0.14))
    given["record_status"](KEY, "a status")
    assert made["status"] == (KEY, "a status")
    assert made["is_edited"] == operator._event_filter.is_edited
    assert made["own_writes"] is operator._own_writes
    assert made["notices"] is operator._notices
    assert made["record_conditions"] == operator._metrics.record_conditions
    assert made["now"] is time.monotonic
    assert made["now_text"] is manager.format_now
    assert abs(datetime.fromisoformat(manager.format_now()).timestamp() - time.time()) < 60.0


@pytest.mark.parametrize(
    ("result", "outcome", "pause_s"),
    [
        (None, "ok", None),
        (5.0, "ok", (4.0, 5.0)),
        (BusyError("429", retry_after_s=50.0), "BusyError", (49.0, 50.0)),
        (ForbiddenError("403"), "ForbiddenError", (0.0, 1.0)),
        (ZeroDivisionError("a mistake"), "fault", (0.0, 1.0)),
    ],
    ids=["done", "to be repeated", "the server asks for a pause", "refused", "a fault of our own"],
)
async def test_each_end_of_a_reconcile_schedules_the_next_one(operator: Operator, result, outcome, pause_s) -> None:
    class StandInReconciler:
        async def reconcile(self, key: ClusterKey) -> float | None:
            operator._event_filter.handle_event(key, {"kind": CLUSTERS.name, "metadata": {}})
            assert operator._event_filter.is_edited(key)
            operator._event_filter._pending_versions.clear()
            if isinstance(result, Exception):
                raise result
            return result

        def is_known(self, _key: ClusterKey) -> bool:
            return True

    operator._queue.add(KEY)
    await operator._reconcile(StandInReconciler(), await operator._queue.get())
    assert operator._metrics.reconciles.labels(outcome)._value.get() == 1
    assert not operator._event_filter.is_edited(KEY)
    wait_s = operator._queue._schedule.wait_s(time.monotonic())
    if pause_s is None:
        assert wait_s is None
    else:
        assert wait_s is not None
        assert pause_s[0] <= wait_s <= pause_s[1]


async def test_a_leader_is_ready_once_it_watches_and_another_replica_while_it_reaches_the_api(
    operator: Operator,
) -> None:
    assert not operator._is_ready()
    operator._is_watching.set()
    assert operator._is_ready()
    operator._is_watching.clear()
    operator._elector.is_leading = False
    assert operator._is_ready()
    operator._elector.is_connected = False
    assert not operator._is_ready()


def test_the_conditions_of_a_cluster_are_metrics_while_they_hold() -> None:
    metrics = OperatorMetrics()

    def read() -> set[tuple[str, ...]]:
        (family,) = metrics.conditions.collect()
        return {tuple(sample.labels.values()) for sample in family.samples}

    ready = {"type": "Ready", "status": "True", "reason": "Serving"}
    metrics.record_conditions("n", "a", [ready, {"type": "Degraded", "status": "True", "reason": "CrashLoop"}])
    metrics.record_conditions("n", "b", [ready])
    metrics.record_conditions("n", "a", [ready, {"type": "Degraded", "status": "False", "reason": "AsExpected"}])
    kept = {("n", "a", "Degraded", "False", "AsExpected"), ("n", "a", "Ready", "True", "Serving")}
    assert read() == kept | {("n", "b", "Ready", "True", "Serving")}
    metrics.record_conditions("n", "b", ())
    assert read() == kept


async def test_the_program_runs_with_the_api_server_s_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration, settings, made = Configuration(), OperatorSettings(), []

    async def load() -> Configuration:
        return configuration

    class StandInOperator:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        async def run(self) -> None:
            made.append("ran")

    monkeypatch.setattr(manager, "load_configuration", load)
    monkeypatch.setattr(manager, "Operator", StandInOperator)
    await manager.run_operator(settings)
    (given, api), ran = made
    assert (given, api.configuration, ran) == (settings, configuration, "ran")


# The program.


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (ExceptionGroup("g", [LeaseLostError("pod-1 no longer leads")]), 1, "exits: pod-1 no longer leads"),
        (CertificateError("no tls.key"), 2, "cannot start: no tls.key"),
    ],
    ids=["it was stopped", "the lease was lost", "no certificate"],
)
def test_the_exit_status_says_how_the_process_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error, status: int, said: str
) -> None:
    given: list[object] = []

    async def run(settings: OperatorSettings) -> None:
        given.append(settings.identity)
        if error is not None:
            raise error

    monkeypatch.setattr(program, "run_operator", run)
    monkeypatch.setattr(program, "set_up_logs", given.append)
    monkeypatch.setattr("sys.argv", ["sluice_operator", "--identity", "pod-1", "--log-level", "DEBUG"])
    assert program.main() == status
    assert given == ["DEBUG", "pod-1"]
    assert caplog.messages == [said] * bool(said)


def test_settings_out_of_bounds_end_the_program_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sluice_operator", "--workers", "0"])
    monkeypatch.delattr(program, "run_operator")
    assert program.main() == 2
    assert "workers" in capsys.readouterr().err
