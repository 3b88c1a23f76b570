"""Plans: refused by name, value and limit or applied whole; in force per engine once acknowledged."""

from __future__ import annotations

import pytest
from data_plane_harness import Harness
from fake_engine import PARAMETERS, make_plan

from sluice.v1 import control_pb2, engine_pb2, plan_pb2
from sluice_core.records import EngineId, Role
from sluice_core.scheduling.iteration_limits import IterationLimits
from sluice_router.errors import PlanRefusedError

PD = {"p0": "P", "d0": "D"}


def engine_plan(**changes: object) -> plan_pb2.EnginePlan:
    return plan_pb2.EnginePlan(
        **{"engine_id": "d0", "role": plan_pb2.ROLE_DECODE_HEAVY, "chunk_size_tokens": 256, **changes}
    )


def parameters(**changes: str) -> dict[str, object]:
    return {"strategy_parameters": {**PARAMETERS, **changes}}


DEFAULT = plan_pb2.SloClass(ttft_milliseconds=1, tpot_milliseconds=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster_uid": ""}, ["cluster_uid", "uid-1"]),
        ({"cluster_uid": "other"}, ["cluster_uid", "other", "uid-1"]),
        ({"generation": 4}, ["generation", "4", "5"]),
        ({"generation": 5, "attainment_percent": 91}, ["generation", "5", "other contents"]),
        ({"strategy": ""}, ["strategy ''", "taichi, aggregated"]),
        ({"strategy": "STRATEGY_TAICHI"}, ["strategy", "STRATEGY_TAICHI"]),
        ({"attainment_percent": 0}, ["attainment_percent", "0", "100"]),
        ({"attainment_percent": 101}, ["attainment_percent", "101", "100"]),
        (parameters(watermark_percent="49"), ["parameters.watermark_percent", "49", "50 to 99"]),
        (parameters(approaching_factor_percent="x"), ["approaching_factor_percent", "x", "50 to 100"]),
        (parameters(early_rejection="0"), ["parameters.early_rejection", "'0'", "Off, Random, Reject"]),
        (parameters(magic="1"), ["parameters.magic", "taichi", "watermark_percent"]),
        ({"strategy": "aggregated"}, ["parameters.approaching_factor_percent", "aggregated"]),
        ({"slo_classes": []}, ["slo_classes", "default"]),
        ({"slo_classes": [plan_pb2.SloClass(name="gold")]}, ["slo_classes", "gold", "default"]),
        ({"slo_classes": [DEFAULT, DEFAULT]}, ["slo_classes", "unique"]),
        ({"slo_classes": [plan_pb2.SloClass(tpot_milliseconds=1)]}, ["slo_classes[0].ttft_milliseconds", "0"]),
        ({"engines": [engine_plan(), engine_plan()]}, ["engines[1].engine_id", "d0", "unique"]),
        ({"engines": [engine_plan(engine_id="")]}, ["engines[0].engine_id"]),
        ({"engines": [engine_plan(role=0)]}, ["engines[0].role", "0"]),
        ({"engines": [engine_plan(chunk_size_tokens=2**31)]}, ["engines[0].chunk_size_tokens", "2147483648"]),
    ],
)
def test_bad_plan_is_refused_whole(changes, words):
    harness = Harness(PD)
    harness.router.apply_plan(make_plan(PD, generation=5))
    harness.deliver()
    before = harness.state.active.plan
    with pytest.raises(PlanRefusedError) as caught:
        harness.router.apply_plan(make_plan(PD, **{"generation": 6, **changes}))
    for word in words:
        assert word in str(caught.value)
    assert harness.state.active.plan is before
    assert not any(harness.down.values())
    assert harness.count("plans", "refused") == 1


def test_first_plan_needs_a_cluster():
    with pytest.raises(PlanRefusedError, match="cluster_uid is empty"):
        Harness({}).router.apply_plan(make_plan(PD, cluster_uid=""))


def test_a_plan_renames_the_model_at_once():
    harness = Harness(PD)
    assert harness.router.model.name == "tiny"
    plan = make_plan(PD, generation=2)
    plan.served_model_name = "renamed"
    harness.router.apply_plan(plan)
    assert harness.router.model.name == "renamed"


def test_same_plan_again_changes_nothing():
    harness = Harness(PD)
    version = harness.state.status.version
    harness.router.apply_plan(make_plan(PD))
    assert harness.state.status.version == version
    assert not any(harness.down.values())


def test_role_counts_from_the_acknowledgement():
    harness = Harness(PD)
    harness.cores["d0"].acknowledges = False
    swapped = make_plan({"p0": "D", "d0": "P"}, generation=2)
    harness.router.apply_plan(swapped)
    harness.deliver()
    table = harness.state.engines.table
    assert table[EngineId("p0")].role is Role.DECODE_HEAVY
    assert table[EngineId("d0")].role is Role.DECODE_HEAVY
    assert table[EngineId("d0")].chunk_size_tokens == 256
    assert harness.router.describe().acknowledged_generation == 1
    harness.cores["d0"].acknowledges = True
    harness.router.apply_plan(make_plan({"p0": "D", "d0": "P"}, generation=3))
    harness.deliver()
    assert table[EngineId("d0")].role is Role.PREFILL_HEAVY
    assert table[EngineId("d0")].chunk_size_tokens == 2048
    assert harness.router.describe().acknowledged_generation == 3


def test_engine_gets_no_placements_before_it_acknowledged():
    harness = Harness(PD)
    core = harness.attach("d1", acknowledges=False)
    harness.deliver()
    assert EngineId("d1") not in harness.state.engines.table
    for _ in range(20):
        harness.admit(20, 2)
    harness.run()
    assert not core.submitted


def test_engine_is_seen_with_the_load_that_it_reported_before_its_acknowledgement():
    harness = Harness(PD)
    harness.attach("d1", acknowledges=False)
    harness.deliver()
    configured = engine_pb2.Configured(
        cluster_uid="uid-1", generation=1, role=plan_pb2.ROLE_DECODE_HEAVY, chunk_size_tokens=256
    )
    # An idle engine may be silent from here on for as long as a heartbeat.
    harness.router.handle_message(harness.engines["d1"], engine_pb2.AttachResponse(configured=configured))
    seen = harness.state.engines.table[EngineId("d1")]
    assert seen.load.kv_blocks_total == 1000
    assert seen.view is not None
    assert seen.view.blocked_reason == ""


def test_chunk_size_above_what_an_engine_can_run_is_cut_for_that_engine_alone():
    """In the midst of a roll that raises the largest batch together with a slider."""
    harness = Harness()
    for name, largest in (("old", 2048), ("new", 4096), ("unnamed", 128)):
        harness.attach(name, max_batch_tokens=largest)
    engines = [
        plan_pb2.EnginePlan(engine_id=name, role=plan_pb2.ROLE_PREFILL_HEAVY, chunk_size_tokens=4096)
        for name in ("old", "new")
    ]
    harness.router.apply_plan(make_plan({}, generation=3, engines=engines))
    harness.deliver()
    status = harness.router.describe()
    assert status.generation == status.acknowledged_generation == 3
    assert {item.engine_id: (item.chunk_size_tokens, item.max_batch_tokens) for item in status.engines} == {
        "old": (2048, 2048),
        "new": (4096, 4096),
        "unnamed": (128, 128),
    }
    assert {item.last_fault for item in status.engines} == {""}
    assert [item.chunk_size_tokens for item in harness.state.engines.table] == [2048, 4096, 128]


def test_drain_is_in_force_on_an_engine_whose_chunk_size_is_cut():
    harness = Harness(PD)
    part = plan_pb2.EnginePlan(
        engine_id="p0", role=plan_pb2.ROLE_PREFILL_HEAVY, chunk_size_tokens=10_000, is_draining=True
    )
    harness.router.apply_plan(make_plan({}, generation=2, engines=[part, engine_plan()]))
    harness.deliver()
    assert harness.cores["p0"].is_draining
    states = {item.engine_id: item.state for item in harness.router.describe().engines}
    assert states == {"p0": control_pb2.ENGINE_STATE_DRAINED, "d0": control_pb2.ENGINE_STATE_READY}


def test_unnamed_engine_serves_with_the_decode_heavy_setting():
    harness = Harness(PD)
    core = harness.attach("new")
    harness.deliver()
    configure = core.commands[-1].configure
    assert configure.role == plan_pb2.ROLE_DECODE_HEAVY
    assert configure.chunk_size_tokens == 256
    assert harness.state.engines.table[EngineId("new")].role is Role.DECODE_HEAVY


def test_engine_that_comes_later_gets_its_part_at_once():
    harness = Harness({"p0": "P"}, plan=False)
    harness.router.apply_plan(make_plan(PD, generation=7))
    core = harness.attach("d0")
    harness.deliver()
    assert core.configured.generation == 7


def test_newer_plan_of_another_router_is_harmless():
    harness = Harness(PD)
    core = harness.cores["d0"]
    core.configured.generation = 9
    core.configured.chunk_size_tokens = 128
    harness.router.apply_plan(make_plan(PD, generation=2))
    harness.deliver()
    assert harness.state.engines.table[EngineId("d0")].chunk_size_tokens == 128
    _, response_stream = harness.admit()
    harness.run()
    assert response_stream.finish is not None


@pytest.mark.parametrize(("cluster_uid", "is_used"), [("uid-1", True), ("uid-2", False)])
def test_engine_that_follows_another_clusters_plan_gets_nothing(cluster_uid, is_used):
    harness = Harness(PD)
    core = harness.attach("d1", acknowledges=False)
    harness.deliver()
    configured = engine_pb2.Configured(
        cluster_uid=cluster_uid, generation=1, role=plan_pb2.ROLE_DECODE_HEAVY, chunk_size_tokens=256
    )
    harness.router.handle_message(harness.engines["d1"], engine_pb2.AttachResponse(configured=configured))
    for _ in range(9):
        harness.admit(20, 2)
    harness.run()
    assert bool(core.submitted) is is_used


def test_engine_that_says_it_drains_gets_nothing_after_its_acknowledgement_either():
    harness = Harness(PD)
    load = harness.cores["d0"].load()
    load.is_draining = True
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(load=load))
    configured = harness.cores["d0"].configured
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(configured=configured))
    assert {harness.engine_of(harness.admit(20, 2)[0]) for _ in range(9)} == {"p0"}


def test_fault_that_an_engine_tells_is_reported():
    harness = Harness(PD)
    version = harness.state.status.version
    harness.router.handle_message(harness.engines["d0"], engine_pb2.AttachResponse(fault="NIXL: no device"))
    status = harness.router.describe()
    assert status.version > version
    assert {item.engine_id: item.last_fault for item in status.engines} == {"p0": "", "d0": "NIXL: no device"}


def test_engine_plan_that_an_engine_refuses_is_reported():
    harness = Harness(PD)
    engine = harness.engines["d0"]
    message = harness.cores["d0"].hello()
    message.ClearField("hello")
    message.configured.error = "chunk_size_tokens is 7, at least 16 is needed"
    version = harness.router.describe().version
    harness.router.handle_message(engine, message)
    assert harness.router.describe().version > version
    faults = {item.engine_id: item.last_fault for item in harness.router.describe().engines}
    assert "at least 16" in faults["d0"]
    assert harness.count("plans", "refused_by_engine") == 1


def test_engines_of_one_model_serve_together_whatever_their_fingerprints():
    harness = Harness()
    for name, fingerprint in (("d0", "m1/block32"), ("d1", "m1/block64")):
        harness.attach(name, model="m1", fingerprint=fingerprint)
    harness.attach("d2", model="m2", fingerprint="m2/block32")
    harness.router.apply_plan(make_plan({"d0": "D", "d1": "D", "d2": "D"}))
    harness.deliver()
    assert {engine.engine_id for engine in harness.state.engines.table} == {"d0", "d1"}
    response_streams = [harness.admit(20, 3)[1] for _ in range(8)]
    harness.run()
    assert all(response_stream.finish is not None for response_stream in response_streams)
    assert harness.cores["d0"].submitted
    assert harness.cores["d1"].submitted
    harness.assert_idle()


@pytest.mark.parametrize("named", ["m1", "m1/block64"], ids=["model", "fingerprint"])
def test_plan_names_a_model_or_a_fingerprint(named):
    harness = Harness()
    harness.attach("d0", model="m1", fingerprint="m1/block64")
    harness.attach("d1", model="m2", fingerprint="m2/block64")
    harness.router.apply_plan(make_plan({"d0": "D", "d1": "D"}, model_fingerprint=named))
    harness.deliver()
    assert [engine.engine_id for engine in harness.state.engines.table] == ["d0"]


def test_foreign_model_is_refused_and_the_rest_serves():
    harness = Harness(PD)
    core = harness.attach("d1", fingerprint="other")
    harness.deliver()
    status = harness.router.describe()
    # The plan is in force on all engines that count.
    assert status.acknowledged_generation == 1
    states = {item.engine_id: item for item in status.engines}
    assert states["d1"].state == control_pb2.ENGINE_STATE_REFUSED
    assert "other" in states["d1"].last_fault
    for _ in range(10):
        harness.admit(20, 2)
    harness.run()
    assert not core.submitted


def test_new_model_is_accepted_when_the_last_engine_of_the_old_one_has_gone():
    harness = Harness(PD)
    harness.attach("n0", fingerprint="new")
    harness.attach("n1", fingerprint="new")
    harness.deliver()
    _, response_stream = harness.admit(20, 30)
    harness.step_all()
    harness.kill("p0")
    harness.kill("d0")
    harness.router.tick()
    harness.deliver()
    # A stream never changes its model: the one that has begun waits, and fails when its time is up.
    assert len(harness.state.engines.table) == 0
    harness.clock.advance(1)
    for _ in range(31):
        for name in ("n0", "n1"):
            harness.router.handle_message(
                harness.engines[name], engine_pb2.AttachResponse(load=harness.cores[name].load())
            )
        harness.clock.advance(1)
        harness.router.tick()
    assert response_stream.error is not None
    assert response_stream.error.code == "no_engine"
    assert response_stream.error.retry_after_s is not None
    assert response_stream.error.retry_after_s >= 30
    harness.router.tick()
    harness.deliver()
    assert len(harness.state.engines.table) == 2
    _, response_stream = harness.admit(20, 3)
    harness.run()
    assert response_stream.finish is not None


def test_model_of_the_plan_decides():
    harness = Harness(PD)
    harness.attach("d1", fingerprint="new")
    harness.router.apply_plan(make_plan(PD, generation=2, model_fingerprint="new"))
    harness.deliver()
    states = {item.engine_id: item.state for item in harness.router.describe().engines}
    refused, ready = control_pb2.ENGINE_STATE_REFUSED, control_pb2.ENGINE_STATE_READY
    assert states == {"p0": refused, "d0": refused, "d1": ready}
    assert [engine.engine_id for engine in harness.state.engines.table] == ["d1"]
    harness.router.apply_plan(make_plan(PD, generation=3, model_fingerprint="fp"))
    harness.deliver()
    engines = {item.engine_id: item for item in harness.router.describe().engines}
    assert [(engines[name].state, engines[name].last_fault) for name in ("p0", "d0")] == [(ready, "")] * 2
    assert engines["d1"].state == refused


def test_plan_change_between_two_messages_breaks_no_stream():
    harness = Harness(PD)
    _, response_stream = harness.admit(20, 60)
    for generation in range(2, 30):
        roles = PD if generation % 2 else {"p0": "D", "d0": "P"}
        harness.router.apply_plan(make_plan(roles, generation=generation))
        harness.step_all()
    harness.run()
    assert response_stream.finish is not None
    assert len(response_stream.token_ids) == 60
    harness.assert_idle()


def test_the_limits_of_a_strategy_end_with_it():
    harness = Harness(PD)
    harness.run()
    table = harness.state.engines.table
    rooms = [engine.room_tokens for engine in table]
    table.limit_iterations(IterationLimits(0.023))
    assert all(engine.room_tokens < room for engine, room in zip(table, rooms, strict=True))
    harness.router.apply_plan(make_plan(PD, generation=2, strategy="aggregated", strategy_parameters={}))
    assert [engine.room_tokens for engine in table] == rooms


def test_a_policy_keeps_what_it_has_learned_while_its_strategy_stays():
    harness = Harness(PD)
    policy = harness.state.active.policy
    harness.router.apply_plan(make_plan({"p0": "D", "d0": "P", "d1": "D"}, generation=2))
    assert harness.state.active.policy is policy
    harness.router.apply_plan(make_plan(PD, generation=3, **parameters(watermark_percent="80")))
    assert harness.state.active.policy is not policy


def test_decisions_outlive_a_plan_change():
    harness = Harness(PD)
    request_id, _ = harness.admit(20, 3)
    harness.run()
    harness.router.apply_plan(make_plan(PD, generation=2, strategy="aggregated", strategy_parameters={}))
    story = harness.router.explain(request_id)
    assert story is not None
    assert "placement" in [event["event"] for event in story["events"]]
