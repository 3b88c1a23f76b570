"""Engines that drain: they are emptied, and rolls break no stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan
from migration_harness import PDD, TWO, check_end, start_on

from sluice.v1 import control_pb2, engine_pb2
from sluice_router.errors import ShuttingDownError
from sluice_router.scheduling.plan import begin_drain
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from sluice_router.scheduling.entities import ConnectedEngine


def test_engine_with_a_submit_on_the_way_is_not_drained():
    harness = Harness(TWO)
    harness.admit(20, 4)
    harness.admit(20, 4)
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    idle = engine_pb2.AttachResponse(load=harness.cores["d0"].load())
    harness.router.handle_message(harness.engines["d0"], idle)
    assert harness.engines["d0"].status == control_pb2.ENGINE_STATE_DRAINING
    harness.run()
    assert harness.engines["d0"].status == control_pb2.ENGINE_STATE_DRAINED


def test_it_is_news_that_an_engine_drains():
    harness = Harness(TWO)
    woken: list[str] = []
    harness.router.on_change(lambda: woken.append("one"))
    begin_drain(harness.state, harness.engines["d0"])
    harness.router.tick()
    assert woken


def test_draining_engine_is_emptied_and_gets_nothing_new():
    roles = {"d0": "D", "d1": "D"}
    harness = Harness(roles)
    request_id, response_stream = start_on(harness, "d0")
    for _ in range(3):
        harness.step_all()
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    assert harness.engine_of(harness.admit(20, 2)[0]) == "d1"
    for _ in range(5):
        harness.clock.advance(0.3)
        harness.step_all()
    assert harness.engine_of(request_id) == "d1"
    assert harness.engines["d0"].status == control_pb2.ENGINE_STATE_DRAINED
    check_end(harness, response_stream)
    assert harness.count("moves", "drain", "done") == 1


@pytest.mark.parametrize("work", ["queued_requests", "running_decodes", "pulling_requests", "kv_blocks_pinned"])
def test_engine_is_drained_only_when_nobody_needs_it_any_more(work):
    """Not even another router's requests, or the engine that pulls KV from it: it is ended once it is drained."""
    harness = Harness(TWO)
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    harness.deliver()
    load = harness.cores["d0"].load()
    for number, state in ((1, control_pb2.ENGINE_STATE_DRAINING), (0, control_pb2.ENGINE_STATE_DRAINED)):
        setattr(load, work, number)
        version = harness.router.describe().version
        harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
        assert harness.router.describe().version > version, "it is news"
        assert {item.engine_id: item.state for item in harness.router.describe().engines}["d0"] == state


def test_draining_engine_proposes_its_decodes_from_time_to_time():
    harness = Harness(TWO, limits=make_limits(drain_retry_s=0.25))
    harness.cores["d1"].refuse_grants = "kv"
    _, response_stream = start_on(harness, "d0", 60)
    harness.step_all()
    harness.router.apply_plan(make_plan({"d0": "D-drain", "d1": "D"}, generation=2))
    for _ in range(20):
        harness.step_all()
    assert harness.count("flow_blocked", "drain", "kv") == 1
    for _ in range(10):
        harness.step_all()
    assert harness.count("flow_blocked", "drain", "kv") == 2
    harness.cores["d1"].refuse_grants = ""
    check_end(harness, response_stream, 60)


def test_kv_moves_between_equal_fingerprints_only():
    harness = Harness()
    for name, fingerprint in (("p0", "new"), ("d0", "old"), ("d1", "new")):
        harness.attach(name, model="m", fingerprint=fingerprint)
    harness.router.apply_plan(make_plan(PDD))
    harness.deliver()
    for _ in range(6):
        start_on(harness, "p0")
    harness.run()
    assert harness.count("moves", "prefill_done", "done") == 6
    assert not harness.cores["d0"].submitted
    harness.assert_idle()


def roll(harness: Harness, name: str, generation: int, requests: list) -> int:
    """Drains an engine under load, and replaces it by one with another fingerprint.

    Returns:
        Generation of the last plan.
    """
    harness.router.apply_plan(make_plan({**TWO, name: "D-drain"}, generation=generation + 1))
    for _ in range(20):
        harness.step_all()
    states = {item.engine_id: item.state for item in harness.router.describe().engines}
    assert states[name] == control_pb2.ENGINE_STATE_DRAINED
    harness.kill(name)
    harness.attach(name, epoch=2, model="m", fingerprint="new")
    harness.router.apply_plan(make_plan(TWO, generation=generation + 2))
    harness.deliver()
    requests += [harness.admit(20, 60) for _ in range(4)]
    for _ in range(3):
        harness.step_all()
    return generation + 2


def test_a_roll_that_changes_the_fingerprint_completes_and_breaks_no_stream():
    harness = Harness()
    for name in TWO:
        harness.attach(name, model="m", fingerprint="old")
    harness.router.apply_plan(make_plan(TWO))
    harness.deliver()
    requests = [harness.admit(20, 120) for _ in range(6)]
    for _ in range(3):
        harness.step_all()
    generation = roll(harness, "d0", 1, requests)
    # Their KV could be read by the other engine of the old fingerprint.
    assert harness.count("recoveries", "fingerprint") == 0
    assert harness.count("moves", "drain", "done") > 0
    roll(harness, "d1", generation, requests)
    assert harness.count("recoveries", "fingerprint") > 0
    harness.run(300)
    for request_id, response_stream in requests:
        assert response_stream.finish is not None, request_id
        assert response_stream.finish.usage.num_recoveries == 0
    assert {engine.fingerprint for engine in harness.engines.values()} == {"new"}
    harness.assert_idle()


def test_the_last_engine_of_its_fingerprint_keeps_its_requests_while_nobody_else_serves():
    harness = Harness(TWO)
    request_id, response_stream = start_on(harness, "d0")
    harness.kill("d1")
    harness.router.apply_plan(make_plan({"d0": "D-drain"}, generation=2))
    harness.run()
    assert response_stream.finish is not None, request_id
    assert harness.count("recoveries", "fingerprint") == 0


def test_engine_that_says_it_drains_is_emptied_too():
    harness = Harness({"d0": "D", "d1": "D"})
    request_id, response_stream = start_on(harness, "d0")
    harness.step_all()
    harness.cores["d0"].is_draining = True
    for _ in range(5):
        harness.clock.advance(0.3)
        harness.step_all()
    assert harness.engine_of(request_id) == "d1"
    check_end(harness, response_stream)


def test_engines_hear_of_a_router_that_leaves_and_so_do_those_that_come_meanwhile():
    harness = Harness(TWO)
    heard: dict[str, list[bool]] = {}
    send = harness.send

    def note(engine: ConnectedEngine, message: engine_pb2.AttachRequest) -> None:
        heard.setdefault(engine.engine_id, []).append(message.is_leaving)
        send(engine, message)

    harness.send = note
    harness.router.tick()
    assert not any(map(any, heard.values()))
    harness.router.stop_accepting()
    harness.attach("d2")
    assert {name for name, said in heard.items() if any(said)} == {"d0", "d1", "d2"}


def test_where_router_and_engines_leave_streams_end_whole_and_prompts_that_wait_are_told_at_once():
    harness = Harness(TWO)
    _, begun = start_on(harness, "d0")
    harness.step_all()
    for core in harness.cores.values():
        core.is_draining = True
    harness.step_all()
    _, waiting = harness.admit(20, 2)
    harness.router.stop_accepting()
    harness.step_all()
    assert isinstance(waiting.error, ShuttingDownError)
    assert waiting.error.retry_after_s is not None
    harness.run()
    check_end(harness, begun)


@pytest.mark.parametrize("who", ["router", "engines", "one engine and the router"])
def test_prompts_wait_on_where_somebody_stays(who):
    harness = Harness(TWO)
    for name in {"router": (), "engines": ("d0", "d1"), "one engine and the router": ("d0",)}[who]:
        harness.cores[name].is_draining = True
    harness.step_all()
    request_id, response_stream = harness.admit(20, 2)
    if who != "engines":
        harness.router.stop_accepting()
    harness.step_all()
    assert response_stream.error is None
    assert (request_id in harness.state.requests.waiting) == (who == "engines")
