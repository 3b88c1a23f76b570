"""Each event is carried out at once: who polls is woken, engines get their messages, and what waits has its turn."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness, make_request
from fake_engine import FakeCore, make_plan
from test_adoption import ABORTED, KEY, PD, adopt, claim, make_found
from test_kept_prefills import make_harness as make_disaggregated_harness
from test_kept_prefills import start

from sluice.v1 import engine_pb2
from sluice_core.records import EngineId
from sluice_router.errors import EngineFaultError

ADDRESS = "127.0.0.1:99"
NEWS = {
    "an address": lambda harness: harness.router.set_addresses(frozenset({*harness.state.engines.endpoints, ADDRESS})),
    "its fault": lambda harness: harness.router.note_fault(ADDRESS, "refused"),
    "it is gone": lambda harness: harness.router.forget(ADDRESS),
    "an edge's fault": lambda harness: harness.router.set_edge_fault("no keys"),
    "a plan": lambda harness: harness.router.apply_plan(make_plan(PD, generation=2)),
    "a lost engine": lambda harness: harness.kill("d0"),
    "a leaving router": lambda harness: harness.router.stop_accepting(),
}


def test_whoever_polls_is_woken_by_each_piece_of_news_and_by_nothing_else():
    harness = Harness(PD)
    woken: list[str] = []
    harness.router.on_change(lambda: woken.append("one"))
    harness.router.on_change(lambda: woken.append("other"))
    for name, happen in NEWS.items():
        woken.clear()
        happen(harness)
        assert woken[:2] == ["one", "other"], name
        woken.clear()
        harness.router.tick()
        assert not woken, name


def list_sent(harness: Harness, field: str) -> list[str]:
    """Lists engines to which a message is on the way."""
    return [
        name
        for name, messages in harness.down.items()
        for message in messages
        if (message.HasField(field) if field == "configure" else getattr(message, field))
    ]


def test_an_engine_hears_of_the_plan_with_its_hello():
    harness = Harness(PD)
    core = harness.cores["d1"] = FakeCore("d1")
    harness.down["d1"] = type(harness.down["d0"])()
    harness.router.attach(ADDRESS, core.hello().hello, lambda engine: harness.engines.setdefault("d1", engine))
    assert list_sent(harness, "configure") == ["d1"]


def test_engines_are_asked_about_an_answer_at_once():
    harness = Harness(PD)
    claim(harness)
    assert list_sent(harness, "claims") == ["p0", "d0"]


def test_an_answer_that_is_computed_again_is_placed_at_once():
    harness = Harness(PD)
    adopt(harness, make_found(num_output=3, reason=ABORTED))
    assert len(list_sent(harness, "submits")) == 1


def test_a_move_by_hand_and_a_cancelled_request_are_told_at_once():
    harness = Harness({"d0": "D", "d1": "D"})
    request_id, stream = harness.admit(20, 20)
    assert len(list_sent(harness, "submits")) == 1
    harness.step_all()
    source = harness.engine_of(request_id)
    target = "d1" if source == "d0" else "d0"
    harness.router.move(request_id, EngineId(target))
    assert list_sent(harness, "grant_requests") == [target]
    stream.is_cancelled = True
    harness.router.cancel(request_id)
    assert list_sent(harness, "aborts") == [source]
    assert list_sent(harness, "released_grant_ids") == [target]


def test_what_is_left_at_the_end_hears_of_it_at_once():
    harness = Harness(PD)
    streams = [harness.admit(20, 20)[1] for _ in range(3)]
    harness.step_all()
    harness.router.fail_all(lambda: EngineFaultError("the end"))
    assert [str(stream.error) for stream in streams] == ["the end"] * 3


def test_nobody_waits_for_a_decode_engine_that_has_just_died():
    harness = make_disaggregated_harness(PD)
    start(harness, 2)
    engine = harness.engines["d0"]
    harness.router.lose(engine, "killed")
    assert not harness.state.requests.kept
    assert harness.count("recoveries", "no_decode_engine") == 2


def test_room_for_a_finished_prefill_is_asked_for_with_its_message():
    harness = make_disaggregated_harness(PD)
    harness.admit(20, 10)
    harness.deliver()
    harness.step("p0")
    harness.deliver_up("p0")
    assert list_sent(harness, "grant_requests") == ["d0"]


def test_a_second_request_waits_for_the_pass_over_the_queue_and_the_first_one_does_not():
    harness = Harness({})
    harness.router.apply_plan(make_plan({"d0": "D"}))
    first, _ = harness.admit()
    harness.attach("d0")
    harness.deliver()
    assert first in harness.state.requests.waiting
    second, _ = harness.admit()
    assert second in harness.state.requests.waiting
    harness.clock.advance(0.006)
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse())
    assert not harness.state.requests.waiting


def test_times_of_decisions_are_short():
    harness = Harness({"d0": "D"})
    for _ in range(5):
        harness.admit()
    assert 0.0 <= harness.state.metrics.decision_s.total < 30.0


@pytest.mark.parametrize("raises", [True, False])
def test_traffic_on_streams_of_messages_is_counted_by_direction(raises):
    harness = Harness({"d0": "D"})
    up, down = harness.count("grpc_messages", "up"), harness.count("grpc_messages", "down")
    message = engine_pb2.AttachResponse(slots=[9]) if raises else engine_pb2.AttachResponse()
    harness.router.handle_message(harness.engines["d0"], message)
    assert harness.count("grpc_messages", "up") == up + 1
    assert harness.count("grpc_messages", "down") == down
    if not raises:
        harness.admit()
        assert harness.count("grpc_messages", "down") == down + 1


def test_a_request_that_a_client_names_is_found_by_either_id():
    harness = Harness({"d0": "D"})
    request = make_request(client_request_id="mine", resume_key=KEY)
    other, _ = harness.admit()
    stream_id, _ = harness.admit(client_request_id="mine")
    queues = harness.state.requests
    assert queues.find("mine") is queues.find(stream_id) is queues.live[stream_id]
    assert queues.find(other) is queues.live[other]
    assert queues.find(request.request_id) is None


def test_the_policy_hears_how_long_each_output_was_and_of_whatever_was_given_up(monkeypatch):
    harness = Harness({"d0": "D"})
    heard: dict[str, list[int]] = {}
    policy = harness.state.active.policy
    monkeypatch.setattr(policy, "note_finished", lambda name, number: heard.setdefault(name, []).append(number))
    finished, cancelled, failed = (harness.admit(20, 4)[0] for _ in range(3))
    harness.router.cancel(cancelled)
    harness.run()
    harness.router.fail_all(lambda: EngineFaultError("why"))
    assert heard[finished][-1] == heard[failed][-1] == 4
    assert heard[cancelled] == [0]
