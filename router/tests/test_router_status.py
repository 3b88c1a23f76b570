"""Status and metrics: what the control plane and a scrape see."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest
from data_plane_harness import Harness
from fake_engine import FakeCore, make_plan, make_rng
from prometheus_client.parser import text_string_to_metric_families

from sluice.v1 import control_pb2, engine_pb2, plan_pb2
from sluice_core.records import EngineId
from sluice_router.api.control_service import ControlService
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.slow_readers import SlowReaderLimits, SlowReaders
from sluice_router.errors import EngineFaultError, InvalidRequestError, QueueFullError
from sluice_router.observability.metrics import Histogram, RouterMetrics
from sluice_router.scheduling.state import RouterState
from sluice_router.scheduling.status.gauges import RouterCollector
from sluice_router.settings import make_limits

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
METRIC = re.compile(r"^\| `(\S+)` \| (histogram|counter|gauge) \| (.*?) ?\| .+ \|$", re.MULTILINE)

PD = {"p0": "P", "d0": "D"}

# Issue: what /metrics must have.
NAMES = [
    "sluice_ttft_seconds",
    "sluice_tpot_seconds",
    "sluice_itl_seconds",
    "sluice_attainment_ratio",
    "sluice_queue_seconds",
    "sluice_requests_waiting",
    "sluice_placements",
    "sluice_moves",
    "sluice_move_duration_seconds",
    "sluice_recoveries",
    "sluice_ttft_prediction_error_seconds",
    "sluice_flow_blocked",
    "sluice_latency_model_error_ratio",
    "sluice_grpc_messages",
    "sluice_engine_link_bytes",
    "sluice_loop_lag_seconds",
    "sluice_decision_seconds",
    "sluice_engines",
    "sluice_plan_generation",
    "sluice_tokens",
    "vllm:num_requests_waiting",
]


def test_metrics_are_complete_and_parse():
    harness = Harness(PD)
    for _ in range(6):
        harness.admit(20, 6)
    harness.run()
    families = {
        family.name: family for family in text_string_to_metric_families(harness.router.format_metrics().decode())
    }
    assert [name for name in NAMES if name not in families] == []
    ratios = {sample.value for sample in families["sluice_attainment_ratio"].samples}
    assert ratios == {1.0}
    ttft = {
        sample.name: sample.value for sample in families["sluice_ttft_seconds"].samples if not sample.labels.get("le")
    }
    assert ttft["sluice_ttft_seconds_count"] == 6


def read_samples(harness: Harness) -> dict[tuple[str, ...], float]:
    """All samples of a scrape, by name and label values."""
    families = text_string_to_metric_families(harness.router.format_metrics().decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_each_histogram_is_shown_by_its_own_name():
    metrics = RouterMetrics()
    labelled = {
        "ttft": ("slo_class", metrics.ttft_s),
        "tpot": ("slo_class", metrics.tpot_s),
        "itl": ("slo_class", metrics.itl_s),
        "request_duration": ("slo_class", metrics.duration_s),
        "queue": ("slo_class", metrics.queue_s),
        "ttft_prediction_error": ("slo_class", metrics.ttft_prediction_error_s),
        "move_duration": ("cause", metrics.move_s),
        "recovery_stall": ("reason", metrics.recovery_stall_s),
    }
    plain = {"decision": metrics.decision_s, "loop_lag": metrics.loop_lag_s}
    for number, (_, histograms) in enumerate(labelled.values(), 1):
        for _ in range(number):
            histograms["x"].observe(0.1)
    for number, histogram in enumerate(plain.values(), 100):
        for _ in range(number):
            histogram.observe(0.1)
    counts = {
        (sample.name, *(item for item in sample.labels.items() if item[0] != "le")): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.labels.get("le") == "+Inf"
    }
    assert counts == {
        **{
            (f"sluice_{name}_seconds_bucket", (label, "x")): number
            for number, (name, (label, _)) in enumerate(labelled.items(), 1)
        },
        **{(f"sluice_{name}_seconds_bucket",): number for number, name in enumerate(plain, 100)},
    }


def test_a_histogram_counts_what_is_up_to_each_bound():
    histogram = Histogram((0.5, 1.0))
    for value in (0.5, 0.6, 1.0, 7.0, -1.0):
        histogram.observe(value)
    assert histogram.format_buckets() == [("0.5", 2), ("1.0", 4), ("+Inf", 5)]
    assert histogram.total == pytest.approx(8.1)


def test_gauges_say_where_moves_and_engines_are():
    harness = Harness(PD)
    harness.attach("d1", fingerprint="other")
    harness.router.set_addresses(frozenset({*harness.state.engines.endpoints, "127.0.0.1:9"}))
    requests = [harness.admit(20, 60)[0] for _ in range(3)]
    harness.router.apply_plan(make_plan({"p0": "P-drain", "d0": "D"}, generation=2))
    harness.step_all()
    samples = read_samples(harness)
    assert samples["sluice_moves_running",] == sum(harness.engine_of(name) == "p0" for name in requests) > 0
    assert samples["sluice_plan_generation",] == 2
    assert {key[1:]: value for key, value in samples.items() if key[0] == "sluice_engines"} == {
        ("", "connecting"): 1,
        ("", "refused"): 1,
        ("D-heavy", "ready"): 1,
        ("P-heavy", "draining"): 1,
    }


def test_gauges_count_requests_that_wait_and_that_run():
    harness = Harness({"d0": "D"})
    harness.admit(20, 60)
    load = harness.cores["d0"].load()
    load.kv_blocks_used = load.kv_blocks_total
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    for _ in range(2):
        harness.admit(20, 60)
    samples = read_samples(harness)
    for prefix in ("sluice_requests", "vllm:num_requests"):
        assert (samples[f"{prefix}_waiting",], samples[f"{prefix}_running",]) == (2, 1)
    status = harness.router.describe()
    assert (status.num_waiting, status.num_requests) == (2, 3)


def test_document_lists_every_metric_with_its_labels():
    state = RouterState(router_id="r", limits=make_limits(), rng=make_rng())
    families = [*RouterCollector(state, lambda: 0.0).collect(), *EdgeMetrics(SlowReaders(SlowReaderLimits())).collect()]
    exposed = {
        (family.name + "_total" * (family.type == "counter"), family.type, tuple(getattr(family, "_labelnames", ())))
        for family in families
    }
    rows = METRIC.findall(DOCUMENT.read_text().partition("## Router")[2].partition("## Engine")[0])
    assert {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exposed


def test_stream_bytes_are_reported_by_engine_and_address_and_outlive_a_stream():
    harness = Harness({"d0": "D"})
    (address,) = harness.state.engines.endpoints
    harness.router.traffic_of(address).num_bytes_up += 700
    harness.router.traffic_of(address).num_bytes_down += 30
    harness.kill("d0")
    harness.router.set_addresses(frozenset({address, "127.0.0.1:9"}))
    text = harness.router.format_metrics().decode()
    (family,) = [item for item in text_string_to_metric_families(text) if item.name == "sluice_engine_link_bytes"]
    labels = ("engine", "address", "direction")
    assert {tuple(map(sample.labels.get, labels)): sample.value for sample in family.samples} == {
        ("d0", address, "up"): 700,
        ("d0", address, "down"): 30,
        ("", "127.0.0.1:9", "up"): 0,
        ("", "127.0.0.1:9", "down"): 0,
    }


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda: Harness({"d0": "D"}, plan=False), "no plan"),
        (lambda: Harness({}), "no plan"),
        (lambda: Harness({"d0": "D"}), ""),
    ],
    ids=["no plan", "nothing", "ready"],
)
def test_readiness_says_what_is_missing(prepare, reason):
    harness = prepare()
    assert harness.router.is_ready is (reason == "")
    assert reason in harness.router.not_ready_reason


def test_router_without_engines_is_not_ready():
    harness = Harness({})
    harness.router.apply_plan(make_plan(PD))
    assert "no engine" in harness.router.not_ready_reason


def test_status_counts_requests_by_class_and_samples_them():
    harness = Harness(PD)
    harness.admit(20, 6)
    _, gone = harness.admit(20, 60)
    harness.step_all()
    gone.is_cancelled = True
    harness.router.cancel(
        next(name for name, response_stream in harness.response_streams.items() if response_stream is gone)
    )
    harness.admit(20, 6, ttft_slo_s=0.0001)
    harness.run()
    status = harness.router.describe()
    (counters,) = status.classes
    assert (counters.num_finished, counters.num_met_ttft, counters.num_met_tpot, counters.num_met_both) == (2, 1, 2, 1)
    assert [(sample.prompt_tokens, sample.output_tokens) for sample in status.samples] == [(20, 6), (20, 6)]
    assert status.generation == status.acknowledged_generation == 1
    assert status.is_ready
    assert {engine.state for engine in status.engines} == {control_pb2.ENGINE_STATE_READY}
    assert {engine.transport for engine in status.engines} == {"fake"}
    assert sum(engine.num_fitted_iterations for engine in status.engines) > 0
    fitted = [engine for engine in status.engines if engine.HasField("latency")]
    assert fitted
    for engine in fitted:
        latency = harness.router.state.engines.table[EngineId(engine.engine_id)].latency
        assert engine.latency.per_token_s == latency.coefficients.per_token_s
        assert engine.latency.base_s > 0
    assert all(engine.block_size_tokens and engine.max_num_seqs for engine in status.engines)
    # Each counts on the engine on which it ended; the one that its client left on none.
    assert sum(engine.num_ended for engine in status.engines) == 2
    assert sum(engine.num_met_both for engine in status.engines) == 1
    assert status.num_failed == 0


def test_status_counts_failures_by_engine_and_those_of_clients_on_none():
    harness = Harness({"d0": "D"})
    for error in (EngineFaultError("gone"), QueueFullError("full"), InvalidRequestError("too long")):
        harness.admit(20, 60)
        harness.step_all()
        harness.router.fail_all(lambda error=error: error)
    status = harness.router.describe()
    (engine,) = status.engines
    assert (engine.num_ended, engine.num_met_both, engine.num_failed) == (1, 0, 1)
    assert status.num_failed == 1


def test_gaps_of_samples_add_up_to_the_time_between_arrivals_in_whatever_order_requests_end():
    harness = Harness(PD)
    started_s = harness.clock.now_s
    arrivals_s = []
    for num_output in (200, 4, 90, 8):
        arrivals_s.append(harness.clock.now_s - started_s)
        harness.admit(20, num_output)
        for _ in range(5):
            harness.step_all()
    harness.run()
    samples = harness.router.describe().samples
    assert [sample.output_tokens for sample in samples] != [200, 4, 90, 8], "they end in another order"
    assert sum(sample.gap_s for sample in samples) <= arrivals_s[-1] + 1e-9
    first_s = min(arrivals_s[(200, 4, 90, 8).index(sample.output_tokens)] for sample in samples[:1])
    assert sum(sample.gap_s for sample in samples) == pytest.approx(arrivals_s[-1] - first_s)
    assert {sample.slo_class for sample in samples} == {""}


def test_finished_requests_are_news_once_a_second():
    harness = Harness(PD)
    harness.admit(20, 2)
    harness.run()
    version = harness.state.status.version
    for _ in range(20):  # 5 requests in 0.2 s
        harness.admit(20, 2)
        harness.step_all()
    assert harness.state.status.version == version
    harness.clock.advance(1)
    harness.router.tick()
    assert harness.state.status.version == version + 1
    harness.clock.advance(1)
    harness.router.tick()
    assert harness.state.status.version == version + 1


async def test_a_poll_waits_as_long_as_it_asks_for_and_a_minute_at_most(monkeypatch):
    router, waits = Harness({"d0": "D"}).router, []

    @contextlib.asynccontextmanager
    async def end_at_once(delay_s: float):
        waits.append(delay_s)
        raise TimeoutError
        yield

    monkeypatch.setattr(asyncio, "timeout", end_at_once)
    version = router.describe().version
    for timeout_s in (-1.0, 5.0, 60.0, 1000.0):
        request = control_pb2.GetStatusRequest(after_version=version, timeout_s=timeout_s)
        assert (await ControlService(router).GetStatus(request, None)).version == version
    # Without a version it waits for nothing.
    await ControlService(router).GetStatus(control_pb2.GetStatusRequest(timeout_s=5.0), None)
    assert waits == [0.0, 5.0, 60.0, 60.0]


def test_new_transport_of_an_engine_is_news():
    """The control plane waits for it: a fall-back from RDMA shows when engines meet."""
    harness = Harness({"d0": "D"})
    version = harness.state.status.version
    for transport, is_news in (("fake", False), ("rc_mlx5", True), ("rc_mlx5", False), ("rc_mlx5,tcp", True)):
        load = harness.cores["d0"].load()
        load.transport = transport
        harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
        assert (harness.state.status.version > version) is is_news
        assert harness.router.describe().engines[0].transport == transport
        version = harness.state.status.version


def test_address_without_a_stream_says_why(caplog):
    caplog.set_level("INFO")
    harness = Harness(PD)
    harness.router.set_addresses(frozenset({*harness.state.engines.endpoints, "127.0.0.1:9"}))
    harness.router.note_fault("127.0.0.1:9", "unavailable: refused")
    (missing,) = [engine for engine in harness.router.describe().engines if not engine.engine_id]
    assert missing.state == control_pb2.ENGINE_STATE_CONNECTING
    assert missing.last_fault == "unavailable: refused"
    # Said again it is no news, for which nobody need be woken.
    version = harness.state.status.version
    harness.router.note_fault("127.0.0.1:9", "unavailable: refused")
    harness.router.note_fault("127.0.0.1:8", "nobody's")
    assert harness.state.status.version == version
    harness.router.note_fault("127.0.0.1:9", "it did not say hello")
    assert harness.state.status.version > version
    said = [record.getMessage() for record in caplog.records if "no stream" in record.getMessage()]
    assert said == [
        f"engine at 127.0.0.1:9: no stream: {why}" for why in ("unavailable: refused", "it did not say hello")
    ]


def test_report_of_an_engine_is_passed_on_until_its_stream_is_lost():
    harness = Harness({"d0": "D"})
    names = {
        "running_decodes": "running_decodes",
        "queued_requests": "waiting_requests",
        "queued_prefill_tokens": "queued_prefill_tokens",
        "kv_blocks_total": "kv_blocks_total",
        "kv_blocks_used": "kv_blocks_used",
        "kv_blocks_granted": "kv_blocks_granted",
        "kv_blocks_pinned": "kv_blocks_pinned",
        "num_moved_in": "num_moved_in",
        "num_moved_out": "num_moved_out",
    }
    values = dict(zip(names, range(1, 10), strict=True))
    load = engine_pb2.LoadReport(**values)
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    for expected in (list(values.values()), [0] * len(names)):
        (engine,) = harness.router.describe().engines
        assert [getattr(engine, shown) for shown in names.values()] == expected
        harness.kill("d0")


def test_attainment_is_of_its_own_class():
    harness = Harness(PD)
    classes = [plan_pb2.SloClass(name=name, ttft_milliseconds=5000, tpot_milliseconds=500) for name in ("", "gold")]
    harness.router.apply_plan(make_plan(PD, generation=2, slo_classes=classes))
    harness.deliver()
    harness.admit(20, 6)
    for ttft_slo_s in (0.0001, 5):
        harness.admit(20, 6, slo_class="gold", ttft_slo_s=ttft_slo_s)
    harness.run()
    samples = read_samples(harness)
    assert samples["sluice_attainment_ratio", ""] == 1
    assert samples["sluice_attainment_ratio", "gold"] == 0.5


@pytest.mark.parametrize("change", ["shutdown", "fault"])
def test_router_that_can_serve_no_longer_says_so_at_once(change):
    harness = Harness(PD)
    version = harness.state.status.version
    if change == "shutdown":
        harness.router.stop_accepting()
    else:
        harness.router.set_edge_fault("no API keys")
    status = harness.router.describe()
    assert status.version > version
    assert not status.is_ready
    assert harness.router.not_ready_reason == {"shutdown": "shutting down", "fault": "no API keys"}[change]


def test_fault_of_an_address_is_over_with_its_next_stream():
    harness = Harness({"d0": "D"})
    (address,) = harness.state.engines.endpoints
    harness.kill("d0")
    harness.router.note_fault(address, "unavailable: refused")
    assert harness.router.describe().engines[0].last_fault
    hello = FakeCore("d0", epoch=2).hello().hello
    harness.router.attach(address, hello, lambda _: None)
    (engine,) = harness.router.describe().engines
    assert (engine.last_fault, engine.epoch) == ("", 2)


def test_address_without_a_stream_leaves_with_the_discoverys():
    harness = Harness({"d0": "D"})
    known = frozenset(harness.state.engines.endpoints)
    harness.router.set_addresses(known | {"127.0.0.1:9"})
    version = harness.state.status.version
    harness.router.set_addresses(known)
    assert {engine.address for engine in harness.router.describe().engines} == known
    assert harness.state.status.version > version


def test_address_that_left_the_discovery_is_forgotten_after_its_stream():
    harness = Harness({"d0": "D"})
    harness.router.set_addresses(frozenset())
    assert len(harness.router.describe().engines) == 1
    harness.kill("d0")
    harness.router.forget("127.0.0.1:1")
    assert not harness.router.describe().engines
