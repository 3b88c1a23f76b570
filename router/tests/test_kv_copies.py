"""Moves whose KV is copied while the request goes on: who is told what, and nothing pinned whoever fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from data_plane_harness import Harness
from fake_engine import BLOCK_SIZE, make_plan
from migration_harness import check_end, start_on

from sluice.v1 import engine_pb2
from sluice_core.records import MoveCause
from sluice_router.scheduling.entities import MigrationPhase
from sluice_router.scheduling.moves import kv_copies
from sluice_router.settings import make_limits

PD = {"p0": "P", "d0": "D"}
PROMPT_TOKENS = 20  # of start_on


def make_harness(roles: dict[str, str] = PD, **limits: float) -> Harness:
    harness = Harness(plan=False, limits=make_limits(**limits))
    for name in roles:
        harness.attach(name, pulls_parts=True)
    harness.router.apply_plan(make_plan(roles))
    harness.deliver()
    return harness


def find_move(harness: Harness, request_id: str):
    return harness.state.requests.live[request_id].migration


def start_copy(harness: Harness, max_tokens: int = 60):
    """Admits a request on p0, and lets its move to d0 get to where the target pulls."""
    request_id, response_stream = start_on(harness, "p0", max_tokens)
    harness.step("p0")
    harness.deliver()
    assert find_move(harness, request_id).phase is MigrationPhase.COPYING
    assert harness.cores["d0"].parts_under_way
    return request_id, response_stream


def messages_to(harness: Harness, name: str, field: str) -> list:
    return [item for message in harness.cores[name].commands for item in getattr(message, field)]


COPIES = [
    # cause, a target, the target pulls parts, the source pulls parts, tokens beyond a block, copies
    (MoveCause.DEGRADE, True, True, True, 1, True),
    (MoveCause.DEGRADE, True, True, True, 0, False),
    (MoveCause.SPLIT, True, True, True, 1, False),
    (MoveCause.DEGRADE, False, True, True, 1, False),
    (MoveCause.DEGRADE, True, False, True, 1, False),
    (MoveCause.DEGRADE, True, True, False, 1, False),
]


@pytest.mark.parametrize(("cause", "has_target", "target_pulls", "source_pulls", "excess", "copies"), COPIES)
def test_only_what_has_a_full_block_and_no_planned_end_is_copied(
    cause, has_target, target_pulls, source_pulls, excess, copies
):
    move = SimpleNamespace(
        cause=cause,
        target=SimpleNamespace(pulls_parts=target_pulls) if has_target else None,
        source=SimpleNamespace(
            engine=SimpleNamespace(pulls_parts=source_pulls, spec=SimpleNamespace(block_size_tokens=BLOCK_SIZE))
        ),
        request=SimpleNamespace(num_tokens=BLOCK_SIZE + excess),
        is_cut=False,
    )
    assert kv_copies.can_copy(move) is copies


def test_the_request_goes_on_while_its_blocks_are_copied_and_then_hands_off():
    harness = make_harness()
    request_id, response_stream = start_copy(harness)
    for _ in range(3):
        harness.step("p0")
        harness.deliver()
    assert len(response_stream.token_ids) == 4
    assert not messages_to(harness, "p0", "hand_offs")
    harness.step("d0")
    harness.deliver()
    assert find_move(harness, request_id).phase is MigrationPhase.HANDING_OFF
    harness.step("p0")
    harness.deliver()
    assert harness.engine_of(request_id) == "d0"
    assert len(harness.cores["d0"].submitted[0].output_token_ids) == 4
    check_end(harness, response_stream, 60)
    assert harness.count("kv_copies", "used") == 1
    (asked,) = messages_to(harness, "d0", "grant_requests")
    # It has room for what is decoded meanwhile.
    assert asked.num_tokens == PROMPT_TOKENS + 2 + BLOCK_SIZE
    (copied,) = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "copied"]
    assert (copied["source"], copied["target"], copied["num_tokens"], copied["num_parts"]) == ("p0", "d0", 16, 1)


def test_a_long_copy_is_followed_by_what_was_decoded_meanwhile():
    harness = make_harness()
    request_id, response_stream = start_copy(harness, 150)
    for _ in range(80):
        harness.step("p0")
        harness.deliver()
    harness.step("d0")
    harness.deliver()
    assert find_move(harness, request_id).phase is MigrationPhase.COPYING
    harness.step("d0")
    harness.deliver()
    assert find_move(harness, request_id).phase is MigrationPhase.HANDING_OFF
    first, second = messages_to(harness, "d0", "part_pulls")
    # All tokens came, each once.
    tokens = [*first.token_ids, *second.token_ids]
    assert tokens == [*response_stream.prompt, *response_stream.token_ids][: second.kv.num_tokens]
    assert [asked.first_token for asked in messages_to(harness, "p0", "kv_offer_requests")] == [0, 16]
    check_end(harness, response_stream, 150)


@pytest.mark.parametrize("capable", ["p0", "d0", ""])
def test_engines_that_cannot_copy_hand_off_at_once(capable):
    harness = Harness(plan=False)
    for name in PD:
        harness.attach(name, pulls_parts=name == capable)
    harness.router.apply_plan(make_plan(PD))
    harness.deliver()
    _, response_stream = start_on(harness, "p0")
    check_end(harness, response_stream)
    assert harness.count("moves", "prefill_done", "done") == 1
    assert not messages_to(harness, "p0", "kv_offer_requests")


def test_a_source_without_an_offer_hands_off_at_once():
    harness = make_harness()
    harness.cores["p0"].refuse_offers = "none"
    _, response_stream = start_on(harness, "p0")
    check_end(harness, response_stream)
    assert harness.count("moves", "prefill_done", "done") == 1
    assert not messages_to(harness, "d0", "part_pulls")


def test_a_part_that_fails_ends_the_move_and_the_request_goes_on():
    harness = make_harness()
    harness.cores["d0"].refuse_parts = "failed"
    request_id, response_stream = start_copy(harness)
    harness.step_all()
    assert harness.engine_of(request_id) == "p0"
    assert find_move(harness, request_id) is None
    assert harness.count("moves", "prefill_done", "part_failed") == 1
    assert harness.count("kv_copies", "abandoned") == 1
    check_end(harness, response_stream, 60)


def test_a_copy_that_takes_too_long_is_given_up():
    harness = make_harness(copy_timeout_s=1, silence_limit_s=50, iteration_age_floor_s=50)
    request_id, response_stream = start_copy(harness)
    harness.clock.advance(1.1)
    harness.router.tick()
    harness.deliver()
    assert find_move(harness, request_id) is None
    assert harness.count("moves", "prefill_done", "copy_timeout") == 1
    # The source's blocks stay until the target has answered: it may still read them.
    assert harness.cores["p0"].offers
    harness.step("d0")
    harness.deliver()
    assert not harness.cores["p0"].offers
    check_end(harness, response_stream, 60)


def test_parts_that_come_do_not_prolong_the_copy_of_a_decode():
    harness = make_harness(copy_timeout_s=1, silence_limit_s=50, iteration_age_floor_s=50)
    request_id, response_stream = start_copy(harness)
    harness.clock.advance(0.9)
    harness.router.tick()
    move = find_move(harness, request_id)
    assert move is not None
    move.copied_s = harness.clock.now_s
    harness.clock.advance(0.2)
    harness.router.tick()
    assert find_move(harness, request_id) is None
    assert harness.count("moves", "prefill_done", "copy_timeout") == 1
    harness.deliver()
    check_end(harness, response_stream, 60)


@pytest.mark.parametrize("step", ["offer asked", "pulling", "answered"])
def test_a_client_that_leaves_during_a_copy_leaves_nothing_behind(step):
    harness = make_harness()
    request_id, _ = start_on(harness, "p0", 60)
    harness.step("p0")
    harness.deliver_up("p0")
    harness.deliver_down("d0")
    harness.deliver_up("d0")
    assert find_move(harness, request_id).phase is MigrationPhase.COPYING
    if step != "offer asked":
        harness.deliver()
    if step == "answered":
        harness.step("d0")
    harness.router.cancel(request_id)
    harness.run()
    harness.step_all()
    harness.assert_idle()


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("step", ["offer asked", "pulling"])
def test_death_during_a_copy_loses_no_token(victim, step):
    harness = make_harness()
    request_id, response_stream = start_on(harness, "p0") if step == "offer asked" else start_copy(harness, 40)
    if step == "offer asked":
        harness.step("p0")
        harness.deliver_up("p0")
        harness.deliver_down("d0")
        harness.deliver_up("d0")
    assert find_move(harness, request_id).phase is MigrationPhase.COPYING
    harness.kill(victim)
    if victim == "d0":
        harness.deliver()
        # An offer that a lost engine may still read ends with its lease.
        assert len(harness.cores["p0"].offers) == (step == "pulling")
        harness.cores["p0"].offers.clear()
        # The request never noticed.
        assert harness.engine_of(request_id) == "p0"
    check_end(harness, response_stream)


def test_a_request_resumes_after_a_stream_that_broke_during_a_copy():
    harness = make_harness()
    request_id, _ = start_copy(harness)
    harness.cores["p0"].hold()
    harness.cores["p0"].offers.clear()  # with their lease
    core = harness.cores["p0"]
    harness.router.lose(harness.engines["p0"], "reset")
    assert harness.state.requests.live[request_id].pending_resume is not None
    assert harness.count("moves", "prefill_done", "source_lost") == 1
    assert core.kept
    harness.step("d0")
    harness.deliver()
    # What it had copied is free again.
    assert not harness.cores["d0"].grants


def test_an_answer_of_an_unknown_copy_changes_nothing():
    harness = make_harness()
    message = engine_pb2.AttachResponse(parts_pulled=[engine_pb2.PartPulled(grant_id=9, num_tokens=16)])
    harness.router.handle_message(harness.engines["d0"], message)
    message = engine_pb2.AttachResponse(kv_offers=[engine_pb2.KvOffer(offer_id=9, reason="none")])
    harness.router.handle_message(harness.engines["p0"], message)
    harness.assert_idle()
