"""Prompts that are cut between two engines: who computes what, what follows a failure, and nothing left behind."""

from __future__ import annotations

import json

import pytest
from data_plane_harness import Harness
from fake_engine import expected_output, make_plan

from sluice.v1 import engine_pb2
from sluice_core.records import Leg, Place
from sluice_router.scheduling.entities import MigrationPhase
from sluice_router.settings import make_limits

TWO = {"e0": "P", "e1": "P"}
PROMPT, CUT, MAX_TOKENS = 100, 70, 10


class Cutting:
    """A router whose policy cuts the prompts of a test where it says."""

    def __init__(self, harness: Harness, cut: int, first: str = "e0", second: str = "e1") -> None:
        self._policy = harness.state.active.policy
        self._cut, self._first, self._second = cut, first, second
        self.num_whole = 0

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def assign(self, now, waiting, engines):
        requests = list(waiting)
        self.num_whole += sum(request.is_whole for request in requests)
        placed = self._policy.assign(now, requests, engines)  # the table knows of the placement
        if self._first not in engines or self._second not in engines:
            return placed
        decisions = []
        for request in requests:
            end = request.prompt_tokens if request.is_whole else self._cut
            route = () if request.is_whole else (Leg(self._first, end), Leg(self._second, request.prompt_tokens + 8))
            decisions.append(
                Place(
                    request_id=request.request_id,
                    engine_id=self._first,
                    predicted_ttft_s=0.1,
                    reason="split",
                    is_feasible=True,
                    route=route,
                )
            )
        return decisions


def make_harness(*, cut: int = CUT, steps: int = 1, engines=TWO, **limits: float) -> Harness:
    harness = Harness(plan=False, limits=make_limits(**limits))
    for name in engines:
        harness.attach(name, pulls_parts=True, cuts_prompts=True, first_part_steps=steps)
    plan = make_plan(engines, strategy="dynaserve", strategy_parameters={})
    for engine in plan.engines:
        engine.chunk_size_tokens = 2048
    harness.router.apply_plan(plan)
    harness.deliver()
    harness.state.active.policy = Cutting(harness, cut)
    return harness


def start(harness: Harness, **fields):
    request_id, stream = harness.admit(PROMPT, MAX_TOKENS, **fields)
    harness.deliver()
    return request_id, stream


def check_end(harness: Harness, stream) -> None:
    harness.run()
    assert stream.token_ids == expected_output(stream.prompt, MAX_TOKENS)
    assert stream.finish is not None
    harness.assert_idle()
    assert not any(engine.copies_due or engine.brought for engine in harness.engines.values())


def submits(harness: Harness, name: str):
    return harness.cores[name].submitted


def list_events(harness: Harness, request_id) -> list[str]:
    return [event["event"] for event in harness.router.explain(request_id)["events"]]


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("cut", [1, 16, CUT, PROMPT - 1])
def test_the_second_engine_goes_on_where_the_first_one_ends(steps, cut):
    harness = make_harness(cut=cut, steps=steps)
    request_id, stream = start(harness)
    check_end(harness, stream)
    (first,), (second,) = submits(harness, "e0"), submits(harness, "e1")
    assert (first.split_prompt_tokens, first.HasField("kv")) == (cut, False)
    assert (second.split_prompt_tokens, second.kv.num_tokens, second.kv.engine_id) == (0, cut, "e0")
    assert list(second.prompt_token_ids) == list(first.prompt_token_ids) == stream.prompt
    assert harness.count("cut_prompts", "moved") == 1
    assert harness.count("moves", "split", "done") == 1
    assert stream.finish.usage.num_hand_offs == 1
    assert "cut" in list_events(harness, request_id)


def test_kv_follows_in_parts_while_the_first_part_is_computed():
    harness = make_harness(steps=5)
    _, stream = start(harness)
    harness.step("e0")
    harness.deliver()
    for _ in range(4):
        harness.step("e1")
        harness.deliver()
        harness.step("e0")
        harness.deliver()
    parts = [part for message in harness.cores["e1"].commands for part in message.part_pulls]
    assert len(parts) >= 3
    tokens = [token for part in parts for token in part.token_ids]
    assert tokens == stream.prompt[: parts[-1].kv.num_tokens]
    check_end(harness, stream)


def test_a_part_under_way_is_waited_for_when_the_first_part_ends():
    harness = make_harness(steps=3)
    request_id, stream = start(harness)
    harness.step("e0")
    harness.deliver()
    assert harness.cores["e1"].parts_under_way
    for _ in range(2):
        harness.step("e0")
        harness.deliver()
    assert request_id in harness.state.requests.kept
    assert not submits(harness, "e1")
    harness.step("e1")
    harness.deliver()
    assert len(submits(harness, "e1")) == 1
    check_end(harness, stream)


def test_the_first_engine_gets_its_blocks_back_as_soon_as_the_second_one_has_the_kv():
    harness = make_harness()
    start(harness)
    harness.step("e0")
    harness.deliver()
    assert harness.cores["e0"].pinned
    (submit,) = submits(harness, "e1")
    assert tell_of_brought(harness) == submit.grant_id
    assert not harness.cores["e0"].pinned
    check_end(harness, next(iter(harness.response_streams.values())))


@pytest.mark.parametrize("tells", [True, False])
def test_a_token_of_the_second_engine_says_as_much(tells):
    harness = make_harness()
    harness.cores["e1"].tells_of_brought = tells
    _, stream = start(harness)
    check_end(harness, stream)
    assert harness.count("cut_prompts", "moved") == 1


@pytest.mark.parametrize("reason", ["kv", "seqs", "draining"])
@pytest.mark.parametrize("steps", [1, 4])
def test_without_room_on_the_second_engine_the_first_one_computes_all(reason, steps):
    harness = make_harness(steps=steps)
    harness.cores["e1"].refuse_grants = reason
    request_id, stream = start(harness)
    check_end(harness, stream)
    assert not submits(harness, "e1")
    first, whole = submits(harness, "e0")
    assert (first.split_prompt_tokens, whole.split_prompt_tokens) == (CUT, 0)
    assert harness.count("cut_prompts", "whole") == 1
    events = harness.router.explain(request_id)["events"]
    assert [event["event"] for event in events[-4:]] == ["whole", "submitted", "first_token", "finished"]
    again = {"at_s": events[-4]["at_s"], "event": "submitted", "engine": "e0", "fence": whole.fence}
    # As it is told: where numbers and truths are not the same.
    assert json.dumps(events[-3]) == json.dumps(again | {"output_tokens": 0, "is_recovery": False})
    assert stream.finish.usage.num_recoveries == 0


def test_the_table_knows_of_the_rest_that_the_first_engine_computes():
    harness = make_harness()
    harness.cores["e1"].refuse_grants = "kv"
    request_id, stream = start(harness)
    harness.step("e0")
    harness.deliver_up("e0")
    while harness.down["e1"] or harness.up["e1"]:
        harness.deliver_down("e1")
        harness.deliver_up("e1")
    table, block_size = harness.state.engines.table, harness.engines["e0"].spec.block_size_tokens
    waiting = table["e0"].in_flight[request_id]
    assert waiting.tokens == PROMPT - CUT // block_size * block_size
    assert waiting.blocks == -(-PROMPT // block_size)
    assert waiting.execute_s > 0.0
    check_end(harness, stream)
    assert not table["e0"].in_flight


def test_room_that_comes_while_the_first_part_is_computed_is_asked_for_again():
    harness = make_harness(steps=4)
    harness.cores["e1"].refuse_grants = "kv"
    _, stream = start(harness)
    harness.step("e0")
    harness.deliver()
    harness.cores["e1"].refuse_grants = ""
    check_end(harness, stream)
    assert harness.count("cut_prompts", "moved") == 1


def test_a_first_engine_that_drains_gives_the_whole_prompt_back():
    harness = make_harness()
    harness.cores["e1"].refuse_grants = "kv"
    request_id, stream = start(harness)
    harness.step("e0")
    harness.deliver_up("e0")
    harness.engines["e0"].is_draining = True
    harness.deliver()
    assert request_id in harness.state.requests.waiting
    harness.engines["e0"].is_draining = False
    check_end(harness, stream)


def tell_of_brought(harness: Harness, reason: str = "") -> int:
    """Lets the second engine say what has become of the KV, before it has computed the rest; returns the grant."""
    part = harness.cores["e1"].parts_under_way.pop()
    part.reason = reason
    harness.up["e1"].append(engine_pb2.AttachResponse(parts_pulled=[part]))
    harness.deliver()
    return part.grant_id


STAGES = ["waiting", "computing", "copying", "kept", "submitted", "brought"]


def bring_to(harness: Harness, stage: str):
    """A cut prompt at a stage of its way."""
    request_id, stream = start(harness)
    live = harness.state.requests.live[request_id]
    if stage == "waiting":
        return request_id, stream
    harness.step("e0")
    if stage == "computing":
        harness.deliver_up("e0")
        assert live.migration is not None
        assert live.migration.phase is MigrationPhase.GRANT_ASKED
        return request_id, stream
    harness.deliver()
    assert live.migration.phase is MigrationPhase.COPYING
    if stage == "copying":
        return request_id, stream
    for _ in range(2):
        harness.step("e0")
        harness.deliver()
    assert live.kept_kv is not None
    if stage == "kept":
        return request_id, stream
    harness.step("e1")
    harness.deliver()
    assert live.migration.phase is MigrationPhase.SUBMITTED
    if stage == "brought":
        tell_of_brought(harness)
        assert live.migration is None
    return request_id, stream


@pytest.mark.parametrize("victim", ["e0", "e1"])
@pytest.mark.parametrize("stage", STAGES)
def test_death_of_either_engine_at_any_stage_loses_nothing(stage, victim):
    harness = make_harness(steps=3)
    _, stream = bring_to(harness, stage)
    harness.kill(victim)
    if victim == "e1":
        harness.cores["e0"].offers.clear()  # by their lease: the reader is gone
    harness.deliver()
    check_end(harness, stream)


@pytest.mark.parametrize("victim", ["e0", "e1"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_broken_stream_at_any_stage_loses_nothing(stage, victim):
    harness = make_harness(steps=3)
    _, stream = bring_to(harness, stage)
    harness.cut(victim)
    if victim == "e1":
        harness.cores["e0"].offers.clear()  # by their lease: nobody says that they were read
    harness.cores[victim].running.clear()
    harness.cores[victim].offers.clear()
    harness.cores[victim].parts_under_way.clear()
    harness.reconnect(victim)
    harness.deliver()
    check_end(harness, stream)


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(stage):
    harness = make_harness(steps=3)
    request_id, _ = bring_to(harness, stage)
    harness.router.cancel(request_id)
    harness.deliver()
    for _ in range(4):
        harness.step_all()
    harness.assert_idle()
    assert not any(engine.copies_due or engine.brought for engine in harness.engines.values())


@pytest.mark.parametrize("reason", ["lapsed", "failed"])
def test_a_part_that_fails_is_followed_by_another_grant(reason):
    harness = make_harness(steps=3)
    harness.cores["e1"].refuse_parts = reason
    _, stream = start(harness)
    check_end(harness, stream)
    assert harness.count("cut_prompts", "moved") == 1
    assert harness.count("moves", "split", f"part_{reason}") == 1


def test_kv_that_the_second_engine_does_not_get_is_given_up_and_computed_there():
    harness = make_harness()
    _, stream = start(harness)
    harness.step("e0")
    harness.deliver()
    tell_of_brought(harness, "failed")
    check_end(harness, stream)
    assert harness.count("moves", "split", "part_failed") == 1


def test_a_copy_lasts_as_long_as_the_first_part_makes_progress_and_no_longer():
    harness = make_harness(steps=14, copy_timeout_s=1, silence_limit_s=50, iteration_age_floor_s=50, pull_timeout_s=50)
    request_id, stream = start(harness)
    for _ in range(12):
        harness.step_all()
        harness.clock.advance(0.09)
    move = harness.state.requests.live[request_id].migration
    assert move is not None
    assert move.phase is MigrationPhase.COPYING
    harness.clock.advance(1.1)
    harness.router.tick()
    assert harness.state.requests.live[request_id].migration is None
    assert harness.count("moves", "split", "copy_timeout") == 1
    check_end(harness, stream)


def test_an_engine_that_cannot_compute_parts_gets_none():
    """With the strategy's own policy: prompts are cut between engines that say that they can."""
    for capable in (True, False):
        harness = Harness(plan=False)
        for name in TWO:
            harness.attach(name, pulls_parts=True, cuts_prompts=capable)
        plan = make_plan(TWO, strategy="dynaserve", strategy_parameters={})
        for engine in plan.engines:
            engine.chunk_size_tokens = 2048
        harness.router.apply_plan(plan)
        harness.deliver()
        streams = [harness.admit(1200 + 16 * index, MAX_TOKENS, first=1 + index)[1] for index in range(24)]
        harness.run()
        assert [stream.token_ids for stream in streams] == [
            expected_output(stream.prompt, MAX_TOKENS) for stream in streams
        ]
        cuts = [submit for core in harness.cores.values() for submit in core.submitted if submit.split_prompt_tokens]
        assert bool(cuts) is capable
        harness.assert_idle()


def test_a_request_that_was_refused_room_is_never_cut_again():
    harness = make_harness()
    harness.cores["e1"].refuse_grants = "kv"
    _, stream = start(harness)
    harness.step("e0")
    harness.deliver()
    assert not harness.state.active.policy.num_whole
    harness.kill("e0")
    harness.deliver()
    assert harness.state.active.policy.num_whole
    check_end(harness, stream)


@pytest.mark.parametrize("is_cut_again", [False, True])
def test_a_router_that_goes_on_with_the_first_part_of_another_one_recomputes_it(is_cut_again):
    """It knows of no parts but those that it has planned itself."""
    harness = make_harness(steps=3)
    request_id, stream = start(harness)
    live = harness.state.requests.live[request_id]
    live.is_adopted = True
    if not is_cut_again:
        live.route = ()
    check_end(harness, stream)
    assert harness.count("recoveries", "router_lost") == (not is_cut_again)
    assert harness.count("cut_prompts", "moved") == 1
