"""Moments and values at the very edge: limits of time, of ids, of plans; clients that cancel while they are told."""

from __future__ import annotations

import re

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan, make_rng
from migration_harness import PDD, TWO, check_end, start_on

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice_core.records import EngineId
from sluice_router.errors import NoEngineError, PlanRefusedError
from sluice_router.scheduling import placement
from sluice_router.settings import make_limits


def test_a_request_waits_as_long_as_it_may_and_no_longer():
    harness = Harness({"d0": "D"}, limits=make_limits(wait_limit_s=4.0, silence_limit_s=1e6, iteration_age_floor_s=1e6))
    harness.kill("d0")
    _, stream = harness.admit()
    harness.clock.advance(3.75)
    harness.router.tick()
    assert stream.error is None
    harness.clock.advance(0.25)
    harness.router.tick()
    assert isinstance(stream.error, NoEngineError)
    assert stream.error.retry_after_s == 4.0
    assert "within 4 s (no_engine)" in str(stream.error)


def test_the_queue_is_placed_again_once_the_interval_is_over(monkeypatch):
    monkeypatch.setattr(placement, "ASSIGN_INTERVAL_S", 0.25)
    harness = Harness({"d0": "D"}, plan=False)
    harness.router.apply_plan(make_plan({"d0": "D"}))
    harness.admit()
    placed = []
    monkeypatch.setattr(placement, "assign", lambda _state, now: placed.append(now))
    start = harness.state.requests.last_assign_s
    for seconds in (0.125, 0.125):
        harness.clock.advance(seconds)
        placement.assign_if_due(harness.state, harness.clock.now_s)
    assert placed == [start + 0.25]


def test_a_pull_has_as_long_as_it_may_take():
    harness = Harness(PDD, limits=make_limits(pull_timeout_s=1.0, silence_limit_s=1e6, iteration_age_floor_s=1e6))
    request_id, stream = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    harness.router.move(request_id, EngineId("d1"))
    harness.deliver()
    harness.step("d0")
    harness.deliver_up("d0")
    assert harness.engine_of(request_id) == "d1"
    submitted_s = harness.clock.now_s
    harness.clock.advance(1.0)
    harness.router.tick()
    assert not harness.count("recoveries", "pull_timeout")
    harness.clock.now_s = submitted_s + 1.25
    harness.router.tick()
    assert harness.count("recoveries", "pull_timeout") == 1
    check_end(harness, stream)


def test_a_deadline_ends_a_request_at_its_moment():
    harness = Harness({"d0": "D"}, limits=make_limits(silence_limit_s=1e6))
    _, stream = harness.admit(deadline_s=harness.clock.now_s + 0.5)
    harness.clock.advance(0.5)
    harness.router.tick()
    assert stream.error is not None
    assert str(stream.error) == "the caller's deadline passed after 0.5 s"


def test_requests_of_a_replaced_model_wait_while_one_of_its_engines_is_left():
    models = [plan_pb2.ServedModel(model_id="new", served_name="n"), plan_pb2.ServedModel(model_id="old")]
    harness = Harness(model_id="old")
    harness.attach("old0", model_id="old")
    harness.attach("new0", model_id="new")
    harness.router.apply_plan(make_plan({"old0": "D-drain", "new0": "D"}, served_models=models))
    harness.deliver()
    harness.router.tick()
    _, stream = harness.admit()
    harness.router.tick()
    assert not stream.is_over
    harness.kill("old0")
    harness.router.tick()
    assert isinstance(stream.error, NoEngineError)
    assert stream.error.retry_after_s == 1.0


def test_a_request_that_an_engine_returned_goes_to_another():
    harness = Harness(TWO)
    request_id, stream = harness.admit()
    first = harness.engine_of(request_id)
    harness.deliver()
    harness.up[first].append(harness.cores[first].return_unstarted())
    harness.clock.advance(0.1)
    harness.deliver()
    assert harness.engine_of(request_id) != first
    # It is avoided once only.
    assert not harness.state.requests.live[request_id].excluded
    check_end(harness, stream, 8)


def test_an_engine_is_told_once_that_a_request_is_over():
    harness = Harness({"d0": "D"})
    request_id, stream = harness.admit()
    harness.deliver()
    stream.is_cancelled = True
    harness.router.cancel(request_id)
    harness.router.fail_all(lambda: NoEngineError("the end", retry_after_s=1.0))
    for _ in range(3):
        harness.router.tick()
    commands = [*harness.cores["d0"].commands, *harness.down["d0"]]
    assert sum(len(command.aborts) for command in commands) == 1


def test_a_resumed_request_counts_as_one_that_had_reached_its_engine():
    """A second death of its engine is a second engine that may have died of it."""
    harness = Harness(TWO, limits=make_limits(max_deaths=1))
    request_id, stream = harness.admit()
    first = harness.engine_of(request_id)
    harness.deliver()
    harness.cut(first)
    harness.reconnect(first)
    harness.deliver()
    assert harness.engine_of(request_id) == first
    assert not harness.state.requests.live[request_id].output_token_ids
    harness.kill(first)
    harness.clock.advance(1.0)
    harness.router.tick()
    assert stream.error is not None
    assert "1 engines failed while they ran the request" in str(stream.error)


def test_a_hand_off_that_is_refused_without_a_word_is_called_refused():
    harness = Harness(TWO)
    request_id, stream = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    harness.router.move(request_id, EngineId("d1"))
    harness.deliver_down("d1")
    harness.deliver_up("d1")
    slot = next(iter(harness.cores["d0"].running))
    refusal = engine_pb2.AttachResponse()
    refusal.hand_offs_refused.add(slot=slot)
    harness.router.handle_message(harness.engines["d0"], refusal)
    assert harness.count("moves", "manual", "refused") == 1
    assert harness.state.requests.live[request_id].migration is None
    # One that comes when none was asked for changes nothing.
    harness.router.move(request_id, EngineId("d1"))
    harness.router.handle_message(harness.engines["d0"], refusal)
    assert harness.state.requests.live[request_id].migration is not None
    assert harness.count("moves", "manual", "refused") == 1
    harness.cores["d0"].refuse_hand_offs = "late"
    check_end(harness, stream)


@pytest.mark.parametrize(("prompt_tokens", "num_blocks"), [(14, 1), (15, 2), (16, 2)])
def test_a_move_needs_room_for_one_token_more(prompt_tokens, num_blocks):
    harness = Harness(TWO)
    request_id, _ = harness.admit(prompt_tokens, 8)
    source = harness.engine_of(request_id)
    harness.deliver()
    harness.step(source)
    harness.deliver()
    asked = []
    policy = harness.state.active.policy

    def target(_now, request, _table):
        asked.append((request.num_blocks, request.excluded, request.planned_target, request.tpot_slo_s))

    policy.target = target
    proposal = harness.cores[source].propose(engine_pb2.MOVE_CAUSE_DRAIN)
    harness.router.handle_message(harness.engines[source], proposal)
    assert asked == [(num_blocks, frozenset(), None, 0.5)]


def test_durations_of_moves_are_told_to_the_microsecond():
    harness = Harness(TWO)
    request_id, stream = start_on(harness, "d0")
    harness.step("d0")
    harness.deliver()
    harness.router.move(request_id, EngineId("d1"))
    harness.clock.advance(0.0123456789)
    check_end(harness, stream)
    (moved,) = [event for event in harness.router.explain(request_id)["events"] if event["event"] == "moved"]
    assert str(moved["duration_s"]).startswith("0.0")
    assert round(moved["duration_s"], 6) == moved["duration_s"]


def test_an_engine_may_say_what_another_router_had_it_configure_before_a_plan_is_known():
    harness = Harness()
    harness.attach("d0")
    configured = engine_pb2.Configured(cluster_uid="uid-1", generation=7, role=plan_pb2.ROLE_DECODE_HEAVY)
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(configured=configured))
    assert harness.engines["d0"].role is None
    assert not harness.count("engine_losses", "protocol")


LIMITS = {
    "generation 0": ({"generation": 0}, "generation is 0, allowed are 1 to 9223372036854775807"),
    "generation too large": (
        {"generation": 2**63},
        "generation is 9223372036854775808, allowed are 1 to 9223372036854775807",
    ),
    "attainment 0": ({"attainment_percent": 0}, "attainment_percent is 0, allowed are 1 to 100"),
    "attainment 101": ({"attainment_percent": 101}, "attainment_percent is 101, allowed are 1 to 100"),
    "ttft 0": (
        {"slo_classes": [plan_pb2.SloClass(tpot_milliseconds=1)]},
        "slo_classes[0].ttft_milliseconds is 0, allowed are 1 to 2147483647",
    ),
    "tpot 0": (
        {"slo_classes": [plan_pb2.SloClass(ttft_milliseconds=1)]},
        "slo_classes[0].tpot_milliseconds is 0, allowed are 1 to 2147483647",
    ),
    "unnamed chunk": (
        {"unnamed_chunk_size_tokens": 2**31},
        "unnamed_chunk_size_tokens is 2147483648, allowed are 0 to 2147483647",
    ),
    "weight 0": (
        {"owner_limits": [plan_pb2.OwnerLimits(owner="a")]},
        "owner_limits[0].weight is 0, allowed are 1 to 1000",
    ),
    "weight 1001": (
        {"owner_limits": [plan_pb2.OwnerLimits(owner="a", weight=1001)]},
        "owner_limits[0].weight is 1001, allowed are 1 to 1000",
    ),
    "owner twice": (
        {"owner_limits": [plan_pb2.OwnerLimits(owner="a", weight=1)] * 2},
        "owner_limits[1].owner is 'a', owners must be unique and not empty",
    ),
    "no owner": (
        {"owner_limits": [plan_pb2.OwnerLimits(weight=1)]},
        "owner_limits[0].owner is '', owners must be unique and not empty",
    ),
    "class": (
        {"owner_limits": [plan_pb2.OwnerLimits(owner="a", weight=1, classes=["", "gold"])]},
        "owner_limits[0].classes are ['gold'], known are ['']",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_of_a_plan_is_named(name):
    changes, message = LIMITS[name]
    harness = Harness()
    with pytest.raises(PlanRefusedError, match=f"^{re.escape(message)}$"):
        harness.router.apply_plan(make_plan({}, **changes))
    assert harness.count("plans", "refused") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 2**63 - 1},
        {"attainment_percent": 1},
        {"attainment_percent": 100},
        {"slo_classes": [plan_pb2.SloClass(ttft_milliseconds=1, tpot_milliseconds=2**31 - 1)]},
        {"unnamed_chunk_size_tokens": 0},
        {"owner_limits": [plan_pb2.OwnerLimits(owner="a", weight=1), plan_pb2.OwnerLimits(owner="b", weight=1000)]},
    ],
)
def test_plans_at_their_limits_are_taken(changes):
    harness = Harness()
    harness.router.apply_plan(make_plan({}, **changes))
    assert harness.count("plans", "applied") == 1


def test_ids_of_requests_are_24_digits_and_no_two_are_the_same():
    harness = Harness()
    ids = {harness.router.make_request_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(re.fullmatch(r"req-[0-9a-f]{24}", request_id) for request_id in ids)


def test_a_client_may_cancel_while_it_is_told_of_a_token():
    harness = Harness(TWO)
    request_id, stream = harness.admit(max_tokens=30)
    other, whole = harness.admit(max_tokens=30)
    take = stream.on_token

    def cancel(token_id, logprobs):
        answer = take(token_id, logprobs)
        if len(stream.token_ids) == 3:
            harness.router.cancel(request_id)
            # It is under way still: the state changes once the event is over.
            assert request_id in harness.state.requests.live
        return answer

    stream.on_token = cancel
    harness.run()
    assert len(stream.token_ids) == 3
    assert len(whole.token_ids) == 30
    assert other not in harness.state.requests.live
    stream.is_cancelled = True
    harness.assert_idle()


def test_the_model_is_what_the_plan_and_the_engines_say_now():
    harness = Harness({"d0": "D"})
    assert (harness.router.model.name, harness.router.model.max_model_len_tokens) == ("tiny", 4096)
    assert harness.router.model is harness.router.model
    harness.attach("d1", max_model_len_tokens=1000)
    assert harness.router.model.max_model_len_tokens == 1000
    harness.router.apply_plan(make_plan({"d0": "D"}, generation=2, served_model_name="other"))
    assert harness.router.model.name == "other"


def test_what_is_counted_of_owners_without_keys_is_forgotten():
    harness = Harness({"d0": "D"}, plan=False)
    limits = [plan_pb2.OwnerLimits(owner="*", requests_per_minute=2, weight=1)]
    harness.router.apply_plan(make_plan({"d0": "D"}, owner_limits=limits))
    harness.deliver()
    for owner in ("alice", "bob"):
        harness.admit(owner=owner)
    harness.run()
    assert harness.count("key_requests", "bob", "finished") or harness.state.metrics.counters["key_requests"]
    harness.router.set_owners(frozenset({"alice"}))
    owners = {labels[0] for labels in harness.state.metrics.counters["key_requests"]}
    assert owners == {"alice"}
    assert set(harness.state.limiter.local) == {"alice"}


def test_random_requests_get_a_seed_and_others_keep_theirs():
    harness = Harness({"d0": "D"})
    expected = make_rng().getrandbits(63)
    request_id, _ = harness.admit(sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=1.0))
    assert harness.state.requests.live[request_id].new.sampling.seed == expected
    request_id, _ = harness.admit(sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=1.0, seed=5))
    assert harness.state.requests.live[request_id].new.sampling.seed == 5
    request_id, _ = harness.admit(sampling=sampling_pb2.SamplingParams(max_tokens=3, temperature=0.0))
    assert not harness.state.requests.live[request_id].new.sampling.HasField("seed")
