"""Runs of one phase, and of a pair: against the simulator of whole clusters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.transfer import LinkSpeed
from sluice_core.planning.parallelism.instances import ModelInstance, Parallelism
from sluice_core.planning.parallelism.phase_goodput import compute_alone_prefill_s
from sluice_core.planning.parallelism.phase_runs import PhaseWorkload, run_decodes, run_pair, run_prefills
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.sim_setup import Arrival, Cell, EngineSetup, NoGrant, SimOptions, TransferLink
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies import get_strategy

ROWS = [TraceRow(prompt_tokens=100, output_tokens=10)]
LINK = LinkSpeed(bytes_per_s=1e6, latency_s=0.001)
PROFILE = IterationProfile(
    linear_s=(0.0, 0.01),
    slope_s=1e-5,
    prefill_base_s=1e-3,
    prefill_work_s=2e-8,
    decode_base_s=1e-3,
    decode_request_s=2e-5,
    decode_context_s=1e-6,
)


def make_instance(pipeline: int = 1, kv_capacity_tokens: int = 1_000_000, scale: float = 1.0) -> ModelInstance:
    profile = IterationProfile(linear_s=(0.0, 0.01 * scale), slope_s=1e-5 * scale, decode_context_s=1e-6)
    return ModelInstance(
        parallelism=Parallelism(1, pipeline),
        stage=profile,
        kv_capacity_tokens=kv_capacity_tokens,
        kv_bytes_per_token=10,
    )


def make_workload(slo: Slo, **changes: object) -> PhaseWorkload:
    return PhaseWorkload(rows=ROWS, slo=slo, link=LINK, **changes)  # type: ignore[arg-type]


def draw_arrivals(seed: int, slo: Slo, num: int = 40, rate_rps: float = 8.0) -> list[Arrival]:
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(rate_rps)
        tokens = rng.randint(1, 2000), rng.randint(1, 60)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=tokens[0], output_tokens=tokens[1], slo=slo))
    return arrivals


def count_least_missed(passes: object, num: int) -> int:
    return next(missed for missed in range(-1, num + 1) if passes(missed))  # type: ignore[operator]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ttft_s=st.floats(0.01, 0.3),
    tpot_s=st.floats(0.008, 0.05),
    kv_capacity_tokens=st.sampled_from([4_000, 12_000, 1_000_000]),
)
def test_a_pair_without_pipelines_misses_what_two_engines_of_a_cluster_miss(
    seed: int, ttft_s: float, tpot_s: float, kv_capacity_tokens: int
) -> None:
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    arrivals = draw_arrivals(seed, slo)
    workload = make_workload(slo, max_num_seqs=12)
    prefill, decode = make_instance(), make_instance(kv_capacity_tokens=kv_capacity_tokens)
    setups = [
        EngineSetup(
            engine_id=EngineId(role.value),
            profile=instance.stage,
            role=role,
            chunk_size_tokens=16_384 if role is Role.PREFILL_HEAVY else 0,
            kv_blocks_total=instance.kv_capacity_tokens // 16,
            kv_bytes_per_token=10,
            max_num_seqs=12 if role is Role.DECODE_HEAVY else 1000,
            link=TransferLink(speed=LINK),
        )
        for role, instance in ((Role.PREFILL_HEAVY, prefill), (Role.DECODE_HEAVY, decode))
    ]
    cell = Cell(engines=setups, strategy=get_strategy("disaggregated"), options=SimOptions(no_grant=NoGrant.WAIT))
    simulation = Simulation(cell, arrivals)
    simulation.run()
    least = count_least_missed(lambda missed: run_pair(workload, prefill, decode, arrivals, missed), len(arrivals))
    assert max(least, 0) == simulation.num_missed


@pytest.mark.parametrize("missed", [0, 1])
def test_a_request_that_the_kv_cache_cannot_hold_is_missed(missed: int) -> None:
    slo = Slo(ttft_s=10.0, tpot_s=1.0)
    arrivals = [
        Arrival(at_s=0.1 * number, prompt_tokens=tokens, output_tokens=5, slo=slo)
        for number, tokens in enumerate((100, 988, 987))
    ]
    # Whole blocks of 16 tokens hold 992.
    assert run_decodes(make_workload(slo), make_instance(kv_capacity_tokens=1000), arrivals, missed) is (missed == 1)
    assert run_decodes(make_workload(slo), make_instance(kv_capacity_tokens=50), arrivals, 2 + missed) is (missed == 1)
    assert run_decodes(make_workload(slo), make_instance(kv_capacity_tokens=50), arrivals[:missed], 1)


def test_a_late_prefill_counts_once_even_if_its_decodes_are_slow_too() -> None:
    slo = Slo(ttft_s=1e-6, tpot_s=1e-6)
    arrivals = draw_arrivals(1, slo, num=20)
    workload = make_workload(slo)
    assert run_pair(workload, make_instance(), make_instance(), arrivals, 20)
    assert not run_pair(workload, make_instance(), make_instance(), arrivals, 19)


def test_decodes_wait_for_kv_over_the_link_and_that_counts_for_tpot() -> None:
    slo = Slo(ttft_s=10.0, tpot_s=0.05)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=1000, output_tokens=11, slo=slo)]
    fast = make_workload(slo)
    # 10 gaps of 11 ms, and 10 000 bytes: 11 ms over this link and a second over a slow one.
    slow = PhaseWorkload(rows=ROWS, slo=slo, link=LinkSpeed(bytes_per_s=1e4, latency_s=0.0))
    assert run_decodes(fast, make_instance(), arrivals, 0)
    assert not run_decodes(slow, make_instance(), arrivals, 0)


@pytest.mark.parametrize(("max_num_seqs", "passes"), [(1, False), (2, True)])
def test_decodes_beyond_the_seats_of_an_instance_wait_and_that_counts_for_tpot(max_num_seqs: int, passes: bool) -> None:  # noqa: FBT001
    slo = Slo(ttft_s=10.0, tpot_s=0.018)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=8, output_tokens=11, slo=slo)] * 2
    assert run_decodes(make_workload(slo, max_num_seqs=max_num_seqs), make_instance(), arrivals, 0) is passes


def test_what_a_prompt_takes_alone_is_what_a_run_of_it_takes() -> None:
    slo = Slo(ttft_s=10.0, tpot_s=1.0)
    instance = ModelInstance(
        parallelism=Parallelism(1, 3), stage=PROFILE, kv_capacity_tokens=10_000, kv_bytes_per_token=10
    )
    arrivals = [Arrival(at_s=0.0, prompt_tokens=1234, output_tokens=1, slo=slo)]
    assert run_prefills(make_workload(slo), instance, arrivals, 0) == [
        pytest.approx(compute_alone_prefill_s(instance, 1234))
    ]


def test_a_pipeline_of_decodes_takes_all_of_its_stages_for_a_token() -> None:
    slo = Slo(ttft_s=10.0, tpot_s=0.035)
    arrivals = [Arrival(at_s=0.0, prompt_tokens=8, output_tokens=50, slo=slo)]
    assert run_decodes(make_workload(slo), make_instance(pipeline=3), arrivals, 0)
    assert not run_decodes(make_workload(slo), make_instance(pipeline=4), arrivals, 0)


def test_prefills_of_a_phase_are_those_of_the_pipeline() -> None:
    slo = Slo(ttft_s=0.045, tpot_s=1.0)
    arrivals = [Arrival(at_s=number * 1.0, prompt_tokens=8, output_tokens=5, slo=slo) for number in range(3)]
    assert run_prefills(make_workload(slo), make_instance(pipeline=4), arrivals, 0) == pytest.approx([0.04, 1.04, 2.04])
    assert run_prefills(make_workload(slo), make_instance(pipeline=5), arrivals, 2) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "rows is empty"),
        ({"target": 0.0}, "target is 0.0; above 0 and up to 1"),
        ({"target": 1.5}, "target is 1.5; above 0 and up to 1"),
        ({"slo": Slo(ttft_s=0.0, tpot_s=1.0)}, "slo.ttft_s is 0.0; it is above 0"),
        ({"slo": Slo(ttft_s=1.0, tpot_s=float("nan"))}, "slo.tpot_s is nan; it is above 0"),
        ({"prefill_batch_tokens": 0}, "prefill_batch_tokens is 0; at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; at least 1"),
        ({"block_size_tokens": 0}, "block_size_tokens is 0; at least 1"),
    ],
)
def test_a_wrong_workload_is_refused_by_its_field(changes: dict[str, object], message: str) -> None:
    fields = {"rows": ROWS, "slo": Slo(ttft_s=1.0, tpot_s=1.0), **changes}
    with pytest.raises(ValueError, match=message):
        PhaseWorkload(**fields)  # type: ignore[arg-type]


def test_every_request_may_have_to_meet_its_objectives_and_each_size_may_be_one() -> None:
    least = {"prefill_batch_tokens": 1, "max_num_seqs": 1, "block_size_tokens": 1}
    assert PhaseWorkload(rows=ROWS[:1], slo=Slo(ttft_s=1.0, tpot_s=1.0), target=1.0, **least).target == 1.0
    assert PhaseWorkload(rows=ROWS, slo=Slo(ttft_s=1.0, tpot_s=1.0)).target == 0.9
