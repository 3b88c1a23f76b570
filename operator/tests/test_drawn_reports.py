"""What routers report, drawn at random: engines as all routers see them, and counts of what ended and arrived.

Each is held to a plain reading: a report to all views at once, a count to the sum of what the routers really did.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import astuple

import pytest

from sluice.v1 import control_pb2, plan_pb2
from sluice_core.records import EngineId, Role
from sluice_core.slo_attainment import SloCounts
from sluice_operator.autoscaling.arrivals import ArrivalCounter
from sluice_operator.routers.attainment import AttainmentWindow
from sluice_operator.routers.engine_outcomes import EngineOutcomes, Outcomes
from sluice_operator.routers.engine_reports import (
    find_refused_engines,
    has_acknowledged,
    merge_reports,
    needs_reconcile,
)

State = control_pb2.EngineState
STATES = [State.Value(f"ENGINE_STATE_{name}") for name in ("READY", "DRAINING", "DRAINED", "LOST", "CONNECTING")]
REFUSED, DRAINED = State.Value("ENGINE_STATE_REFUSED"), State.Value("ENGINE_STATE_DRAINED")
ATTACHED = STATES[:3]
ROLES = {
    plan_pb2.ROLE_PREFILL_HEAVY: Role.PREFILL_HEAVY,
    plan_pb2.ROLE_DECODE_HEAVY: Role.DECODE_HEAVY,
    plan_pb2.ROLE_UNSPECIFIED: None,
}


def draw_engine(rng: random.Random, engine_id: str) -> control_pb2.EngineStatus:
    return control_pb2.EngineStatus(
        engine_id=engine_id,
        address=f"{engine_id}:1",
        epoch=rng.randrange(2),
        state=rng.choice([*STATES, *ATTACHED, *ATTACHED, REFUSED]),
        role=rng.choice([*ROLES, plan_pb2.ROLE_DECODE_HEAVY, plan_pb2.ROLE_DECODE_HEAVY]),
        chunk_size_tokens=rng.choice([0, 256, 1024]),
        acknowledged_generation=rng.randrange(3, 6),
        running_decodes=rng.randrange(4),
        waiting_requests=rng.randrange(4),
        transport=rng.choice(["", "tcp", "rc"]),
        last_fault=rng.choice(["", "a fault", "another"]),
        serves_other_model=rng.random() < 0.3,
    )


def draw_status(rng: random.Random, router_id: str) -> control_pb2.GetStatusResponse:
    engines = [draw_engine(rng, name) for name in ("e1", "e2", "e3", "") if rng.random() < 0.8]
    return control_pb2.GetStatusResponse(
        router_id=router_id,
        generation=rng.randrange(3, 6),
        acknowledged_generation=rng.randrange(3),
        is_ready=rng.random() < 0.5,
        engines=engines,
    )


@pytest.mark.parametrize("seed", range(60))
def test_an_engine_is_what_all_routers_with_a_stream_to_it_say(seed: int) -> None:
    rng = random.Random(seed)
    statuses = [draw_status(rng, f"r{number}") for number in range(rng.randrange(1, 4))]
    found = merge_reports(statuses)
    seen = {
        name: [view for status in statuses for view in status.engines if view.engine_id == name]
        for name in ("e1", "e2", "e3")
    }
    views = {name: [view for view in all_ if view.state in ATTACHED] for name, all_ in seen.items()}
    assert set(found) == {name for name, attached in views.items() if attached}
    for name, report in found.items():
        first = views[name][0]
        roles = [ROLES[view.role] for view in views[name]]
        assert report.role == (roles[0] if roles.count(roles[0]) == len(roles) else None)
        assert report.chunk_size_tokens == min(view.chunk_size_tokens for view in views[name])
        assert report.acknowledged_generation == min(view.acknowledged_generation for view in views[name])
        assert report.is_drained == (not [view for view in views[name] if view.state != DRAINED])
        assert report.load == max(view.running_decodes + view.waiting_requests for view in views[name])
        assert report.transport == next((view.transport for view in views[name] if view.transport), first.transport)
        assert report.fault == next((view.last_fault for view in views[name] if view.last_fault), first.last_fault)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_acknowledged_by_every_router_and_every_engine_that_it_names(seed: int) -> None:
    rng = random.Random(seed)
    statuses = [draw_status(rng, f"r{number}") for number in range(rng.randrange(3))]
    reports = merge_reports(statuses)
    names = rng.sample(["e1", "e2", "e3"], rng.randrange(3))
    plan = plan_pb2.Plan(generation=4, engines=[plan_pb2.EnginePlan(engine_id=name) for name in names])
    late_routers = [status for status in statuses if status.generation < 4]
    late_engines = [
        name for name in names if name not in reports or reports[EngineId(name)].acknowledged_generation < 4
    ]
    assert has_acknowledged(plan, reports, statuses) == (bool(statuses) and not late_routers and not late_engines)


def test_an_engine_that_a_router_refuses_is_named_once_with_the_reason() -> None:
    rng = random.Random(1)
    statuses = {f"r{number}": draw_status(rng, f"r{number}") for number in range(300)}
    lines = [
        f"engine {view.engine_id} at {view.address}: {view.last_fault}"
        for status in statuses.values()
        for view in status.engines
        if view.state == REFUSED and not view.serves_other_model
    ]
    assert len(set(lines)) < len(lines)
    assert find_refused_engines(statuses) == sorted(set(lines))


NEWS = {"router_id": "other", "generation": 9, "acknowledged_generation": 9, "is_ready": True}
ENGINE_NEWS = {
    "engine_id": "other",
    "epoch": 9,
    "state": DRAINED,
    "role": plan_pb2.ROLE_DECODE_HEAVY,
    "chunk_size_tokens": 9,
    "acknowledged_generation": 9,
    "transport": "rc",
}


@pytest.mark.parametrize("field", [*NEWS, "num_arrived", "num_requests", "num_failed", "version"])
def test_each_field_of_a_router_that_is_acted_on_is_news_and_no_other(field: str) -> None:
    old, new = control_pb2.GetStatusResponse(), control_pb2.GetStatusResponse()
    setattr(new, field, NEWS.get(field, 9))
    assert needs_reconcile(old, new) is (field in NEWS)
    assert not needs_reconcile(new, new)
    assert needs_reconcile(None, new)
    assert not needs_reconcile(None, None)


@pytest.mark.parametrize("field", [*ENGINE_NEWS, "running_decodes", "waiting_requests", "num_ended", "kv_blocks_used"])
def test_each_field_of_an_engine_that_is_acted_on_is_news_and_no_other(field: str) -> None:
    old, new = control_pb2.EngineStatus(), control_pb2.EngineStatus()
    setattr(new, field, ENGINE_NEWS.get(field, 9))
    statuses = [control_pb2.GetStatusResponse(engines=[control_pb2.EngineStatus(), engine]) for engine in (old, new)]
    assert needs_reconcile(*statuses) is (field in ENGINE_NEWS)


class PlayedRouter:
    """A router whose counters grow as requests end; ``seen`` is what ended between two of its statuses."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.classes: Counter[tuple[str, str]] = Counter()
        self.engines: Counter[tuple[str, str]] = Counter()
        self.num_failed = self.num_arrived = 0

    def end_requests(self, rng: random.Random, seen: Counter[tuple[str, str]]) -> None:
        for _ in range(rng.randrange(5)):
            engine, name = rng.choice(["e1", "e2"]), rng.choice(["", "chat"])
            met_ttft, met_tpot, has_failed = (rng.random() < share for share in (0.7, 0.6, 0.2))
            marks = {"ended": True, "ttft": met_ttft, "tpot": met_tpot, "both": met_ttft and met_tpot}
            for mark in [mark for mark, holds in marks.items() if holds]:
                self.classes[name, mark] += 1
                self.engines[engine, mark] += 1
                seen[name, mark] += 1
                seen[engine, mark] += 1
            if has_failed:
                self.num_failed += 1
                self.engines[engine, "failed"] += 1
                seen[engine, "failed"] += 1
                seen["all", "failed"] += 1
            self.num_arrived += 2
            seen["all", "arrived"] += 2

    def report(self) -> control_pb2.GetStatusResponse:
        counted = self.classes
        return control_pb2.GetStatusResponse(
            router_id=self.router_id,
            num_failed=self.num_failed,
            num_arrived=self.num_arrived,
            classes=[
                control_pb2.ClassCounters(
                    name=name,
                    num_finished=counted[name, "ended"],
                    num_met_ttft=counted[name, "ttft"],
                    num_met_tpot=counted[name, "tpot"],
                    num_met_both=counted[name, "both"],
                )
                for name in ("", "chat")
                if counted[name, "ended"]
            ],
            engines=[
                control_pb2.EngineStatus(
                    engine_id=name,
                    num_ended=self.engines[name, "ended"],
                    num_met_both=self.engines[name, "both"],
                    num_failed=self.engines[name, "failed"],
                )
                for name in ("e1", "e2")
            ]
            # One that a router knows by its address only.
            + [control_pb2.EngineStatus(num_ended=self.num_arrived)],
        )


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_of_what_ended_and_arrived_while_somebody_looked(seed: int) -> None:
    rng = random.Random(seed)
    window, outcomes, arrivals = AttainmentWindow(), EngineOutcomes(), ArrivalCounter()
    routers = [PlayedRouter(f"r{number}") for number in range(3)]
    seen: Counter[tuple[str, str]] = Counter()
    known: set[str] = set()
    for step in range(60):
        router = rng.choice(routers)
        # The first status of a router is a beginning.
        router.end_requests(rng, seen if router.router_id in known else Counter())
        known.add(router.router_id)
        for counter in (outcomes, arrivals):
            counter.take(router.report())
        window.take(float(step), router.report())
        if rng.random() < 0.1:
            # A router is gone, and another one comes in its place; or it only was not heard for a while.
            gone = rng.choice(routers)
            known.discard(gone.router_id)
            if rng.random() < 0.5:
                routers[routers.index(gone)] = PlayedRouter(f"r{step + 10}")
            kept = known & {each.router_id for each in routers}
            window.keep_routers(kept)
            arrivals.keep_routers(kept)
            outcomes.keep({"e1", "e2"}, kept)
    assert arrivals.total == seen["all", "arrived"]
    for name in ("e1", "e2"):
        assert outcomes.total(name) == tuple(seen[name, mark] for mark in ("ended", "both", "failed"))
    ended, both = (seen["", mark] + seen["chat", mark] for mark in ("ended", "both"))
    assert outcomes.total() == Outcomes(ended, both, seen["all", "failed"])
    by_class = window.sum_up(60.0)
    for name in ("", "chat"):
        counted = {mark: seen[name, mark] for mark in ("ended", "ttft", "tpot", "both")}
        assert astuple(by_class[name]) == tuple(counted.values())
    assert window.total == sum(by_class.values(), SloCounts())


def test_an_engine_whose_stream_begins_anew_counts_from_nothing_and_one_that_is_gone_is_forgotten() -> None:
    outcomes = EngineOutcomes()

    def take(**counts: tuple[int, int, int]) -> None:
        engines = [
            control_pb2.EngineStatus(engine_id=name, num_ended=ended, num_met_both=met, num_failed=failed)
            for name, (ended, met, failed) in counts.items()
        ]
        outcomes.take(control_pb2.GetStatusResponse(router_id="r", engines=engines))

    take(e1=(9, 8, 1))
    take(e1=(9, 8, 1))
    assert outcomes.total("e1") == Outcomes()
    take(e1=(4, 3, 2))
    assert outcomes.total("e1") == Outcomes(4, 3, 2), "fewer than before: it began anew"
    take(e1=(4, 4, 2), e2=(2, 1, 1))
    assert (outcomes.total("e1"), outcomes.total("e2")) == (Outcomes(4, 4, 2), Outcomes(2, 1, 1))
    outcomes.keep({"e2"}, {"r"})
    assert (outcomes.total("e1"), outcomes.total("e2")) == (Outcomes(), Outcomes(2, 1, 1))
    take(e1=(5, 5, 2), e2=(2, 1, 1))
    assert outcomes.total("e1") == Outcomes(1, 1, 0), "the router has not forgotten it"


def test_a_router_that_counts_less_than_before_takes_no_arrival_back() -> None:
    arrivals = ArrivalCounter()
    for number in (5, 9, 3, 4):
        arrivals.take(control_pb2.GetStatusResponse(router_id="r", num_arrived=number))
    assert arrivals.total == 5
