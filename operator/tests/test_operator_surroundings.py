"""What stands around the operator's decisions: command line, logs, metrics, probes, quantities, identities."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import aiohttp
import pydantic
import pytest
from prometheus_client import generate_latest
from verdicts import LEAST, merge

from sluice_operator import health, logs
from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.labels import CLUSTER_LABEL
from sluice_operator.api.manifest import ManifestError, check_manifest
from sluice_operator.api.model_identity import identify_model, name_revision_key, needs_resolution
from sluice_operator.api.names import ClusterKey
from sluice_operator.controller import informer
from sluice_operator.health import MAX_LAG_S, MAX_QUEUE_AGE_S, Health
from sluice_operator.kubernetes.quantities import add_bytes, read_quantity
from sluice_operator.metrics import BUCKETS_S, OperatorMetrics
from sluice_operator.resources.pods.pod_status import read_pod
from sluice_operator.settings import OperatorSettings, parse_settings

# --- the command line ----------------------------------------------------------------------------------------------


def test_what_is_not_set_has_its_default() -> None:
    settings = parse_settings([], {})
    assert settings == OperatorSettings(identity=socket.gethostname())
    assert (settings.namespaces, settings.labels_of_monitors) == ((), {})
    assert (settings.max_concurrent_upgrades, settings.workers, settings.resync_s, settings.port) == (1, 8, 420.0, 9090)
    assert (settings.cluster_monitors, settings.allow_host_access, settings.log_level) == (True, False, "INFO")


def test_the_command_line_wins_over_the_environment() -> None:
    environment = {"SLUICE_OPERATOR_WORKERS": "3", "SLUICE_OPERATOR_PORT": "1", "WORKERS": "9"}
    settings = parse_settings(
        ["--port", "2", "--watch-namespaces", " a, b ,,c", "--monitor-labels", "x=1,y="], environment
    )
    assert (settings.workers, settings.port) == (3, 2)
    assert settings.namespaces == ("a", "b", "c")
    assert settings.labels_of_monitors == {"x": "1", "y": ""}
    assert parse_settings(["--allow-host-access", "true", "--cluster-monitors", "false"], {}).allow_host_access
    assert parse_settings([], {"SLUICE_OPERATOR_IDENTITY": ""}).identity == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--workers", "257"],
        ["--resync-s", "0"],
        ["--request-timeout-s", "5.1"],
        ["--port", "65536"],
        ["--max-concurrent-upgrades", "-1"],
        ["--log-level", "LOUD"],
        ["--monitor-labels", "x"],
        ["--gpu-resource-name", "a b"],
    ],
)
def test_values_out_of_bounds_are_refused(arguments: list[str]) -> None:
    with pytest.raises(pydantic.ValidationError):
        parse_settings(arguments, {})


def test_an_unknown_option_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--what"], {})
    assert "sluice_operator" in capsys.readouterr().err


# --- logs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept_loggers() -> Any:
    """Puts back what ``set_up_logs`` changes."""
    root, kopf = logging.getLogger(), logging.getLogger("kopf")
    handlers, level, kopf_level = list(root.handlers), root.level, kopf.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    kopf.setLevel(kopf_level)


@pytest.mark.usefixtures("kept_loggers")
def test_logs_are_lines_of_json_that_name_their_object(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("INFO")
    token = logs.current_object.set("llm/qwen")
    logging.getLogger("a").info("replicas are %d", 3)
    logging.getLogger("b").warning("other", extra={"object": "pod x"})
    logs.current_object.reset(token)
    logging.getLogger("a").debug("not shown")
    logging.getLogger("c").error("nobody's")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["logger"], line["object"], line["message"]) for line in lines] == [
        ("INFO", "a", "llm/qwen", "replicas are 3"),
        ("WARNING", "b", "pod x", "other"),
        ("ERROR", "c", "", "nobody's"),
    ]
    assert all(set(line) == {"time", "level", "logger", "object", "message"} for line in lines)


@pytest.mark.usefixtures("kept_loggers")
@pytest.mark.parametrize(
    ("level", "kopfs"), [("DEBUG", logging.WARNING), ("WARNING", logging.WARNING), ("ERROR", logging.ERROR)]
)
def test_kopf_is_quieter_than_the_rest(level: str, kopfs: int) -> None:
    logs.set_up_logs(level)
    assert logging.getLogger("kopf").level == kopfs
    assert logging.getLogger().level == logging.getLevelName(level)
    assert len(logging.getLogger().handlers) == 1


# --- metrics -------------------------------------------------------------------------------------------------------


def read_samples(metrics: OperatorMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_calls_count_by_verb_resource_and_status_and_last_by_verb() -> None:
    metrics = OperatorMetrics()
    metrics.record_call("get", "pods", 200, 0.02)
    metrics.record_call("get", "pods", 200, 0.3)
    metrics.record_call("apply", "services", 409, 0.3)
    samples = read_samples(metrics)
    assert samples["sluice_operator_api_calls_total", ("get", "pods", "200")] == 2
    assert samples["sluice_operator_api_calls_total", ("apply", "services", "409")] == 1
    assert samples["sluice_operator_api_call_seconds_sum", ("get",)] == pytest.approx(0.32)
    assert samples["sluice_operator_api_call_seconds_bucket", ("get", "0.025")] == 1
    bounds = [
        float(labels[1])
        for name, labels in samples
        if name == "sluice_operator_api_call_seconds_bucket" and labels[0] == "get"
    ]
    assert bounds == [*BUCKETS_S, float("inf")]


def test_conditions_that_are_over_are_not_shown_any_more() -> None:
    metrics = OperatorMetrics()

    def record(*conditions: tuple[str, str, str], cluster: str = "a") -> set[tuple[str, ...]]:
        items = [dict(zip(("type", "status", "reason"), each, strict=True)) for each in conditions]
        metrics.record_conditions("llm", cluster, items)
        samples = read_samples(metrics)
        shown = {labels for name, labels in samples if name == "sluice_operator_cluster_condition"}
        assert all(samples["sluice_operator_cluster_condition", labels] == 1 for labels in shown)
        return shown

    ready, slow = ("Ready", "True", "Serving"), ("SLOMet", "False", "Missed")
    assert record(ready, slow) == {("llm", "a", *ready), ("llm", "a", *slow)}
    assert record(ready, cluster="b") == {("llm", "a", *ready), ("llm", "a", *slow), ("llm", "b", *ready)}
    assert record(ready) == {("llm", "a", *ready), ("llm", "b", *ready)}
    assert record(cluster="b") == {("llm", "a", *ready)}
    assert record() == set()
    assert record() == set()


def test_every_metric_is_exported_by_its_name() -> None:
    text = generate_latest(OperatorMetrics().registry).decode()
    for name in (
        "reconciles",
        "reconcile_seconds",
        "api_calls",
        "api_call_seconds",
        "queue_length",
        "queue_age_seconds",
        "last_event_age_seconds",
        "loop_lag_seconds",
        "is_leader",
        "clusters",
        "cluster_condition",
        "router_links",
    ):
        assert f"# TYPE sluice_operator_{name}" in text


# --- probes --------------------------------------------------------------------------------------------------------


class Probed:
    """A replica whose clock, queue and readiness a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.age_s = 0.0
        self.is_ready = False
        self.num_refreshed = 0
        self.metrics = OperatorMetrics()
        self.health = Health(self.metrics, refresh=self.refresh, is_ready=lambda: self.is_ready, now=lambda: self.now)

    def refresh(self) -> float:
        self.num_refreshed += 1
        return self.age_s


async def test_pages_say_whether_this_replica_is_alive_and_ready() -> None:
    probed = Probed()
    task = asyncio.create_task(probed.health.run("127.0.0.1", 0))
    await probed.health.started.wait()
    assert probed.health.port > 0

    async with aiohttp.ClientSession(f"http://127.0.0.1:{probed.health.port}") as session:

        async def get(path: str) -> tuple[int, str, str]:
            async with session.get(path) as response:
                return response.status, await response.text(), response.headers["Content-Type"]

        assert (await get("/livez"))[:2] == (200, "ok\n")
        assert (await get("/readyz"))[:2] == (503, "not ready\n")
        probed.is_ready = True
        assert (await get("/readyz"))[:2] == (200, "ok\n")
        refreshed = probed.num_refreshed
        status, text, kind = await get("/metrics")
        assert (status, kind) == (200, health.METRICS_CONTENT_TYPE)
        assert "sluice_operator_clusters" in text
        assert probed.num_refreshed == refreshed + 1
        status, text, _ = await get("/else")
        assert (status, text) == (404, "/livez, /readyz and /metrics are here\n")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("lag_s", "age_s", "words"),
    [
        (0.0, 0.0, "ok"),
        (MAX_LAG_S, MAX_QUEUE_AGE_S, "ok"),
        (MAX_LAG_S + 0.1, 0.0, "the event loop lags by 10.1 s"),
        (0.0, MAX_QUEUE_AGE_S + 1, "a cluster has been due or in work for 601 s"),
    ],
)
async def test_a_blocked_loop_or_a_cluster_without_a_worker_restarts_the_process(
    lag_s: float, age_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lag is what a sleep took beyond its time."""
    probed = Probed()
    probed.age_s = age_s
    ticks = 0

    async def sleep(duration_s: float) -> None:
        nonlocal ticks
        ticks += 1
        if ticks > 1:
            raise asyncio.CancelledError
        probed.now += duration_s + lag_s

    monkeypatch.setattr(health.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await probed.health._tick()
    answer = probed.health.show_liveness()
    assert (answer.status, answer.text.strip()) == (200 if words == "ok" else 500, words)
    assert read_samples(probed.metrics)["sluice_operator_loop_lag_seconds", ()] == pytest.approx(lag_s)


# --- quantities and identities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (3, 3),
        ("0", 0),
        ("1.5", 1.5),
        ("500m", 0.5),
        ("2u", 2e-6),
        ("2n", 2e-9),
        ("1k", 1e3),
        ("1M", 1e6),
        ("1G", 1e9),
        ("1T", 1e12),
        ("1P", 1e15),
        ("1E", 1e18),
        ("1Ki", 2**10),
        ("1Mi", 2**20),
        ("1Gi", 2**30),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1e3", 1000),
        ("1E-2", 0.01),
        ("2.Gi", 2**31),
    ],
)
def test_a_quantity_is_a_number_with_a_suffix(quantity: int | str, value: float) -> None:
    assert float(read_quantity(quantity)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("quantity", ["", "Gi", "-1", "1 Gi", "1K", "1ki", "1iG", "1.5.2", ".5", "1e100", "x"])
def test_what_is_no_quantity_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        read_quantity(quantity)


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [("1Gi", "512Mi", "1536Mi"), ("1Mi", 1, "1048577"), ("500m", "0", "1"), (2**20, 0, "1Mi"), ("1k", "1k", "2000")],
)
def test_amounts_of_memory_add_up_to_whole_bytes(first: int | str, second: int | str, total: str) -> None:
    assert add_bytes(first, second) == total


CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "a"}}


@pytest.mark.parametrize(
    ("model", "differs"),
    [
        ({"name": "m", "source": CLAIM, "servedName": "other"}, False),
        ({"name": "n", "source": CLAIM}, True),
        ({"name": "m", "source": CLAIM, "revision": "1"}, True),
        ({"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models", "path": "b"}}}, True),
        ({"name": "m", "source": {"persistentVolumeClaim": {"claimName": "other", "path": "a"}}}, True),
        ({"name": "m", "source": {"huggingFace": {}}}, True),
        ({"name": "m", "source": {"image": {"reference": "models", "path": "b"}}}, True),
    ],
)
def test_a_model_is_another_where_its_tokens_may_differ(model: dict[str, Any], *, differs: bool) -> None:
    plain = identify_model(ModelSpec(name="m", source=CLAIM))
    assert len(plain) == 12
    assert (identify_model(ModelSpec(**model)) != plain) is differs


@pytest.mark.parametrize(
    ("source", "revision", "needs"),
    [
        ({"huggingFace": {}}, None, True),
        ({"huggingFace": {}}, "main", True),
        ({"huggingFace": {}}, "0" * 40, False),
        ({"huggingFace": {}}, "0" * 39, True),
        (CLAIM, None, False),
    ],
)
def test_a_revision_is_resolved_where_the_hub_may_move_it(source: Any, revision: str | None, *, needs: bool) -> None:
    assert needs_resolution(ModelSpec(name="m", source=source, revision=revision)) is needs
    assert name_revision_key("m").endswith("m")


TOKEN = "spec.model.source.huggingFace.tokenSecretRef"


# --- what kopf is told, and what Kubernetes says of pods ----------------------------------------------------------


def test_kopf_waits_and_watches_as_the_operator_needs() -> None:
    settings = informer.make_settings()
    assert (settings.posting.enabled, settings.scanning.disabled) == (False, True)
    assert (settings.queueing.idle_timeout, settings.queueing.exit_timeout) == (informer.IDLE_S, 0.1)
    assert settings.watching.inactivity_timeout == informer.INACTIVITY_S
    assert settings.watching.reconnect_backoff == informer.RECONNECT_S


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"kind": "ServingCluster", "metadata": {"namespace": "n", "name": "c"}}, ClusterKey("n", "c")),
        (
            {"kind": "Pod", "metadata": {"namespace": "n", "name": "p", "labels": {CLUSTER_LABEL: "c"}}},
            ClusterKey("n", "c"),
        ),
        ({"kind": "Pod", "metadata": {"namespace": "n", "name": "p", "labels": {}}}, None),
        ({"kind": "Pod", "metadata": {"namespace": "n", "name": "p"}}, None),
        ({"kind": "Pod"}, None),
    ],
)
def test_an_object_belongs_to_the_cluster_that_its_label_names(body: dict[str, Any], key: ClusterKey | None) -> None:
    assert informer.find_key(body) == key


@pytest.mark.parametrize(
    ("condition", "fails"),
    [
        ({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}, True),
        ({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}, False),
        ({"type": "PodScheduled", "status": "True"}, False),
        ({"type": "Ready", "status": "False", "reason": "Unschedulable"}, False),
    ],
)
def test_a_pod_fits_no_node_when_its_scheduler_says_so(condition: dict[str, str], *, fails: bool) -> None:
    pod = read_pod({"metadata": {"name": "p", "uid": "u"}, "status": {"conditions": [condition]}})
    assert (pod.failure is not None) is fails
    if pod.failure is not None:
        assert pod.failure.message.startswith("pod p fits no node (0/3 nodes)")


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ({"replica": 2}, "spec.replica: is not a field of ServingCluster; remove it (did you mean replicas?)"),
        (
            {"slo": {"ttftMillisecond": 2}},
            "spec.slo.ttftMillisecond: is not a field of ServingCluster; remove it (did you mean ttftMilliseconds?)",
        ),
        (
            {"model": {"source": {"huggingFace": {"tokenSecretRef": {"nam": "x"}}}}},
            f"{TOKEN}.nam: is not a field of ServingCluster; remove it (did you mean name?)",
        ),
        (
            {"slo": {"classes": [{"name": "a", "ttftMilliseconds": 1, "tpotMilliseconds": 1, "prio": 3}]}},
            "spec.slo.classes[0].prio: is not a field of ServingCluster; remove it (did you mean priority?)",
        ),
        (
            {"chunkSizes": {"zzz": 1}},
            "spec.chunkSizes.zzz: is not a field of ServingCluster; remove it (known here: decodeHeavy, prefillHeavy)",
        ),
    ],
)
def test_a_field_that_is_misspelt_is_answered_with_the_one_that_is_meant(edit: dict[str, Any], line: str) -> None:
    with pytest.raises(ManifestError) as caught:
        check_manifest(merge(LEAST, {"spec": edit}))
    assert line in [str(problem) for problem in caught.value.problems]
