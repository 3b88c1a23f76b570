"""Attainment over five minutes, from counters that start anew with every router."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.v1 import control_pb2
from sluice_core.slo_attainment import ATTAINMENT_WINDOW_S, SloCounts
from sluice_operator.routers.attainment import AttainmentWindow, format_share


def status(router_id: str, num_finished: int, num_met: int, name: str = "") -> control_pb2.GetStatusResponse:
    counters = control_pb2.ClassCounters(
        name=name, num_finished=num_finished, num_met_ttft=num_met, num_met_tpot=num_met, num_met_both=num_met
    )
    return control_pb2.GetStatusResponse(router_id=router_id, classes=[counters] if num_finished else [])


def test_the_first_status_is_only_a_beginning() -> None:
    window = AttainmentWindow()
    window.take(0.0, status("a", 100, 50))
    assert window.sum_up(0.0) == {}
    window.take(1.0, status("a", 110, 59))
    assert window.sum_up(1.0) == {"": SloCounts(num_finished=10, num_met_ttft=9, num_met_tpot=9, num_met_both=9)}


def test_a_class_that_appears_later_counts_from_its_first_request() -> None:
    window = AttainmentWindow()
    window.take(0.0, status("a", 0, 0))
    window.take(1.0, status("a", 3, 2, "batch"))
    assert window.sum_up(1.0)["batch"].num_finished == 3


def test_routers_are_summed_and_a_new_process_counts_from_zero() -> None:
    window = AttainmentWindow()
    for router in ("a", "b"):
        window.take(0.0, status(router, 0, 0))
        window.take(1.0, status(router, 5, 5))
    window.keep_routers(["b"])
    window.take(2.0, status("a2", 0, 0))
    window.take(3.0, status("a2", 7, 0))
    assert window.sum_up(3.0)[""].num_finished == 17


def test_requests_leave_after_five_minutes() -> None:
    window = AttainmentWindow()
    window.take(0.0, status("a", 0, 0))
    window.take(10.0, status("a", 5, 5))
    window.take(200.0, status("a", 6, 5))
    assert window.sum_up(10.0 + ATTAINMENT_WINDOW_S)[""].num_finished == 6
    assert window.sum_up(11.0 + ATTAINMENT_WINDOW_S)[""].num_finished == 1
    assert window.sum_up(201.0 + ATTAINMENT_WINDOW_S) == {}


@settings(deadline=None)
@given(st.integers(1, 10**6), st.data())
def test_a_share_never_reads_better_than_it_is(finished, data) -> None:
    met = data.draw(st.integers(0, finished))
    text = format_share(met, finished)
    assert float(text.removesuffix("%")) * finished <= met * 100 + 1e-6 * finished
    assert (text == "100%") == (met == finished)


def test_shares_read_as_the_schema_wants_them() -> None:
    assert [format_share(met, 1000) for met in (0, 1, 934, 999, 1000)] == ["0%", "0.1%", "93.4%", "99.9%", "100%"]
