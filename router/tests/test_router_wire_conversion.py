"""Wire and core records say the same."""

from __future__ import annotations

import dataclasses
import math

import pytest
from data_plane_harness import Harness
from fake_engine import make_plan

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice_core.records import EngineId, EnginePlan, MoveCause, Role, Slo, SloClass
from sluice_core.scheduling.engine_state import DuePrefills, EngineLoad
from sluice_core.strategies import STRATEGIES
from sluice_core.strategy_parameters import EarlyRejection
from sluice_router.scheduling import wire_conversion
from sluice_router.text.prompt_hashes import PrefixScheme


def test_plan_is_read_in_core_units():
    classes = [
        plan_pb2.SloClass(ttft_milliseconds=1500, tpot_milliseconds=40),
        plan_pb2.SloClass(name="gold", ttft_milliseconds=500, tpot_milliseconds=20, priority=3),
    ]
    plan = wire_conversion.plan_from(make_plan({"p0": "P", "d0": "D-drain"}, slo_classes=classes, num_routers=0))
    assert plan.parameters.watermark == pytest.approx(0.95)
    assert plan.parameters.approaching_factor == pytest.approx(0.96)
    assert plan.parameters.early_rejection is EarlyRejection.OFF
    assert plan.slo_classes == (
        SloClass(name="", slo=Slo(ttft_s=1.5, tpot_s=0.04)),
        SloClass(name="gold", slo=Slo(ttft_s=0.5, tpot_s=0.02), priority=3),
    )
    assert plan.engines[EngineId("d0")] == EnginePlan(role=Role.DECODE_HEAVY, chunk_size_tokens=256, is_draining=True)
    assert plan.num_routers == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_part_of_a_plan_survives_the_way_to_the_engine(strategy):
    values = {row.name: row.choices[-1] if row.choices else str(row.high) for row in STRATEGIES[strategy].parameters}
    message = make_plan({"p0": "P", "d0": "D"}, strategy=strategy, strategy_parameters=values)
    plan = wire_conversion.plan_from(message)
    configure = wire_conversion.configure_message(plan, plan.engines[EngineId("p0")])
    assert configure.strategy == message.strategy
    assert dict(configure.strategy_parameters) == values
    assert list(configure.chunk_sizes_tokens) == [256, 2048]
    assert (configure.cluster_uid, configure.generation) == (message.cluster_uid, message.generation)
    assert (configure.role, configure.chunk_size_tokens) == (plan_pb2.ROLE_PREFILL_HEAVY, 2048)


@pytest.mark.parametrize(
    ("values", "enum"),
    [
        (wire_conversion.ROLES, plan_pb2.Role),
        (wire_conversion.CAUSES, engine_pb2.MoveCause),
    ],
)
def test_every_value_of_the_wire_but_the_unspecified_one_is_known(values, enum):
    assert set(values) == set(enum.values()) - {0}


def test_every_cause_of_the_core_has_a_value():
    assert set(wire_conversion.CAUSE_VALUES) == set(MoveCause)


def test_load_report_is_read_field_by_field():
    report = engine_pb2.LoadReport(is_of_others=True)
    others = {"iteration_remaining_s", "due"}
    names = [field.name for field in dataclasses.fields(EngineLoad) if field.name not in others]
    for number, name in enumerate(names, start=1):
        if name != "is_of_others":
            setattr(report, name, number)
    load = wire_conversion.load_from(report, 7.0, 0.5)
    assert {name: getattr(load, name) for name in names} == {name: getattr(report, name) for name in names}
    assert load.iteration_remaining_s == 0.5
    assert load.due == []


def test_prompts_are_due_on_the_clock_of_the_router():
    due = [
        engine_pb2.DuePrefills(due_s=2.5, allowed_s=4.0, requests=3, tokens=70, attention_work=900.0),
        engine_pb2.DuePrefills(due_s=math.inf, allowed_s=math.inf, requests=1, tokens=9, attention_work=40.5),
    ]
    load = wire_conversion.load_from(engine_pb2.LoadReport(due=due), 7.0, 0.0)
    assert load.due == [DuePrefills(9.5, 4.0, 3, 70, 900.0), DuePrefills(math.inf, math.inf, 1, 9, 40.5)]


@pytest.mark.parametrize(
    ("fields", "prefill_phase_s", "saved_tpot_s"),
    [
        ({}, 0.0, math.inf),
        ({"prefill_phase_s": 1.0, "saved_tpot_s": 2.0}, 1.25, 1.75),
        ({"prefill_phase_s": 0.0, "saved_tpot_s": 0.0}, 0.0, -0.25),
    ],
)
def test_times_of_a_load_report_count_from_when_it_is_read(fields, prefill_phase_s, saved_tpot_s):
    load = wire_conversion.load_from(engine_pb2.LoadReport(iteration_age_s=0.25, **fields), 7.0, 0.0)
    assert (load.prefill_phase_s, load.saved_tpot_s) == (prefill_phase_s, saved_tpot_s)


@pytest.mark.parametrize(
    ("root", "block_size_tokens", "is_known"), [(b"r", 16, True), (b"r", 0, False), (b"", 16, False)]
)
def test_an_engine_that_does_not_say_how_it_hashes_reports_no_prefixes(root, block_size_tokens, is_known):
    hello = engine_pb2.EngineHello(prefix_root=root, block_size_tokens=block_size_tokens)
    scheme = wire_conversion.prefix_scheme_from(hello)
    assert scheme == (PrefixScheme(root=root, block_size_tokens=block_size_tokens) if is_known else None)


@pytest.mark.parametrize(
    ("value", "role"),
    [
        (plan_pb2.ROLE_UNSPECIFIED, Role.DECODE_HEAVY),
        (plan_pb2.ROLE_PREFILL_HEAVY, Role.PREFILL_HEAVY),
        (plan_pb2.ROLE_DECODE_HEAVY, Role.DECODE_HEAVY),
    ],
)
def test_an_engine_without_a_role_serves_as_a_decode_heavy_one(value, role):
    assert wire_conversion.role_from(value) is role


@pytest.mark.parametrize(("temperature", "is_random"), [(None, True), (0.0, False), (0.1, True), (1.0, True)])
def test_sampling_is_random_but_at_temperature_zero(temperature, is_random):
    assert wire_conversion.is_random(sampling_pb2.SamplingParams(temperature=temperature)) is is_random


def test_submit_carries_durations_and_no_times():
    harness = Harness({"d0": "D"})
    harness.clock.advance(123456)
    request_id, _ = harness.admit(20, 9, priority=5, ttft_slo_s=1.5, tpot_slo_s=0.05)
    harness.clock.advance(0.25)
    harness.kill("d0")
    harness.attach("d0", epoch=2)
    harness.deliver()
    harness.clock.advance(0.25)
    harness.router.tick()
    harness.deliver()
    (submit,) = harness.cores["d0"].submitted
    assert submit.request_id == request_id
    assert submit.age_s == pytest.approx(0.5)
    assert not submit.HasField("since_first_token_s")
    assert (submit.priority, submit.ttft_slo_s, submit.tpot_slo_s) == (5, 1.5, 0.05)
    assert (submit.fence, submit.submit_number) == (2, 1)
