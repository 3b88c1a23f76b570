"""Metrics and probes over HTTP."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from engine_server_harness import find_port

from sluice.v1 import sampling_pb2
from sluice_engine import core_messages
from sluice_engine.server.counters import ServerCounters
from sluice_engine.server.probes import start_http
from sluice_engine.server.prometheus_metrics import (
    LOAD_COUNTERS,
    LOAD_GAUGES,
    SERVER_COUNTERS,
    EngineCollector,
)


@pytest.fixture
def server():
    counters = ServerCounters(num_tokens=7, iteration_s=0.5)
    counters.finished[sampling_pb2.FINISH_REASON_HANDED_OFF] = 3
    load = core_messages.SchedulerLoad(kv_blocks_total=40, num_moved_in=2)
    numbers = {"num_requests": 4, "num_routers": 1, "num_held": 2, "num_kept_ends": 3}
    return SimpleNamespace(counters=counters, load=load, is_draining=True, **numbers)


@pytest.fixture
def address(server):
    port = find_port()
    state = SimpleNamespace(is_ready=True)
    http = start_http("127.0.0.1", port, server, lambda: state.is_ready)
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", state=state)
    http.shutdown()
    http.server_close()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_what_the_server_has_now(address, server):
    server.counters.num_tokens = 9
    status, text = get(f"{address.url}/metrics")
    assert status == 200
    lines = text.splitlines()
    for line in (
        "sluice_engine_output_tokens_total 9.0",
        "sluice_engine_iteration_seconds_total 0.5",
        "sluice_engine_kv_blocks_total 40.0",
        "sluice_engine_moved_in_total 2.0",
        'sluice_engine_finished_total{reason="handed_off"} 3.0',
        "sluice_engine_requests 4.0",
        "sluice_engine_held_requests 2.0",
        "sluice_engine_kept_ends 3.0",
        "sluice_engine_draining 1.0",
    ):
        assert line in lines


# Metrics that are not named as what they show.
RENAMED = {
    "pull_bytes_per_s": "pull_bytes_per_second",
    "num_suspended_prefills": "suspended_prefills_total",
    "num_tokens": "output_tokens_total",
    "num_refused": "refused_submits_total",
    "iteration_s": "iteration_seconds_total",
}


def test_each_metric_shows_its_own_number():
    numbers = {row[1]: float(number) for number, row in enumerate((*LOAD_GAUGES, *LOAD_COUNTERS, *SERVER_COUNTERS), 1)}
    shown = SimpleNamespace(**numbers, finished={})
    routers = {"num_requests": 101, "num_held": 102, "num_kept_ends": 103, "num_routers": 104}
    server = SimpleNamespace(counters=shown, load=shown, is_draining=False, **routers)
    samples = {sample.name: sample.value for metric in EngineCollector(server).collect() for sample in metric.samples}
    gauges = {field for _, field, _ in LOAD_GAUGES}
    expected = {
        RENAMED.get(field) or (field if field in gauges else f"{field.removeprefix('num_')}_total"): number
        for field, number in numbers.items()
    }
    expected |= {"requests": 101, "held_requests": 102, "kept_ends": 103, "routers": 104, "draining": 0}
    assert samples == {f"sluice_engine_{name}": number for name, number in expected.items()}


def test_every_number_of_the_load_and_the_counters_has_a_metric():
    named = {field for _, field, _ in (*LOAD_GAUGES, *LOAD_COUNTERS, *SERVER_COUNTERS)}
    expected = {*core_messages.SchedulerLoad.__struct_fields__, *ServerCounters.__dataclass_fields__}
    of_the_moment = {"prefill_phase_s", "saved_tpot_s"}
    assert expected - named - of_the_moment == {
        "finished",
        "is_draining",
        "generation",
        "queued_attention_work",
        "under_way",
        "late_attention_work",
        "due",
    }


def test_readiness_follows_the_engine_and_liveness_does_not(address):
    assert get(f"{address.url}/readyz") == (200, "ready\n")
    address.state.is_ready = False
    assert get(f"{address.url}/readyz") == (503, "not ready\n")
    assert get(f"{address.url}/livez") == (200, "ok\n")


def test_probes_write_no_lines_and_hold_no_process(address, capfd):
    get(f"{address.url}/readyz")
    assert capfd.readouterr() == ("", "")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "metrics"]
    assert thread.daemon


def test_an_unknown_path_lists_the_known_ones(address):
    assert get(f"{address.url}/") == (404, "/metrics, /livez and /readyz are here\n")
