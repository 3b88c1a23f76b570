"""DistServe's placement algorithms: against brute force, at their edges, and with wrong input."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.pipeline_stages import make_stage_profile
from sluice_core.planning.parallelism.instances import (
    GpuNodes,
    ModelInstance,
    Parallelism,
    Phase,
    count_nodes,
    list_parallelisms,
)
from sluice_core.planning.parallelism.phase_goodput import (
    GoodputMeter,
    GoodputTask,
    choose_duration_s,
    estimate_start_rps,
)
from sluice_core.planning.parallelism.phase_runs import PhaseWorkload
from sluice_core.planning.parallelism.placement_search import (
    NodeAffinity,
    NoPlacementError,
    PlacementProblem,
    list_pairs,
    place_phases,
)
from sluice_core.records import Slo
from sluice_core.sim.traces import TraceRow

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LAYERS = 4
ROWS = [TraceRow(prompt_tokens=40 * number, output_tokens=4 + number) for number in range(1, 20)]
WORKLOAD = PhaseWorkload(rows=ROWS, slo=Slo(ttft_s=2.4, tpot_s=0.3))


def make_instance(parallelism: Parallelism) -> ModelInstance:
    """Makes an instance whose layers go 1.7 times as fast on each twofold of GPUs, from 200 ms and 2 ms a token."""
    speed = 1.7 ** math.log2(parallelism.tensor)
    profile = IterationProfile(
        linear_s=(0.0, *((0.2 + 2e-3 * 8 * row) / speed for row in range(1, 100))), decode_context_s=4e-6 / speed
    )
    return ModelInstance(
        parallelism=parallelism,
        stage=make_stage_profile(profile, parallelism.pipeline, 0.0),
        kv_capacity_tokens=20_000 * parallelism.num_gpus,
        kv_bytes_per_token=1000,
    )


def make_problem(nodes: GpuNodes, rate_rps: float = 10.0, workload: PhaseWorkload = WORKLOAD) -> PlacementProblem:
    parallelisms = list_parallelisms(nodes, NUM_LAYERS)
    return PlacementProblem(
        workload=workload,
        instances={each: make_instance(each) for each in parallelisms},
        nodes=nodes,
        rate_rps=rate_rps,
        seeds=(1,),
        duration_s=120.0,
    )


def run_tasks(tasks: Sequence[GoodputTask]) -> list[float]:
    meter = GoodputMeter(WORKLOAD)
    return [meter.measure(task) for task in tasks]


# --- what there is to choose from


def test_parallelisms_share_layers_within_a_node_and_stages_among_all() -> None:
    assert list_parallelisms(GpuNodes(num_nodes=2, gpus_per_node=2), 6) == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]


@given(nodes=st.integers(1, 3), gpus=st.integers(1, 6), layers=st.integers(1, 12))
def test_no_parallelism_that_fits_is_missing(nodes: int, gpus: int, layers: int) -> None:
    expected = {
        (tensor, pipeline)
        for tensor, pipeline in itertools.product(range(1, 20), repeat=2)
        if tensor <= gpus and tensor * pipeline <= nodes * gpus and layers % pipeline == 0
    }
    found = list_parallelisms(GpuNodes(num_nodes=nodes, gpus_per_node=gpus), layers)
    assert set(found) == expected
    assert len(found) == len(expected)


@given(num_nodes=st.integers(1, 3), gpus=st.integers(1, 5))
def test_pairs_are_all_whose_stages_share_nodes(num_nodes: int, gpus: int) -> None:
    """Each of g nodes has the same part of both phases, as Algorithm 2 walks through them."""
    nodes = GpuNodes(num_nodes=num_nodes, gpus_per_node=gpus)
    layers = 12
    expected: dict[tuple[Parallelism, Parallelism], int] = {}
    for groups in range(1, num_nodes + 1):
        inner = [
            (tensor, stages)
            for tensor, stages in itertools.product(range(1, gpus + 1), repeat=2)
            if tensor * stages <= gpus and layers % (stages * groups) == 0
        ]
        for (tensor_p, stages_p), (tensor_d, stages_d) in itertools.product(inner, repeat=2):
            if tensor_p * stages_p + tensor_d * stages_d <= gpus:
                key = (Parallelism(tensor_p, stages_p * groups), Parallelism(tensor_d, stages_d * groups))
                expected.setdefault(key, groups)
    found = list_pairs(nodes, list_parallelisms(nodes, layers))
    assert {(pair[Phase.PREFILL], pair[Phase.DECODE]): groups for pair, groups in found} == expected


@given(groups=st.lists(st.integers(1, 4), max_size=12))
def test_groups_of_gpus_are_packed_into_nodes(groups: list[int]) -> None:
    num_nodes = count_nodes(groups, 4)
    assert num_nodes >= math.ceil(sum(groups) / 4)
    assert num_nodes <= len(groups)
    # First fit, the largest first, is exact for sizes up to 4 in nodes of 4.
    assert num_nodes == pack_exactly(sorted(groups, reverse=True))


def pack_exactly(groups: list[int]) -> int:
    fours, threes, twos, ones = (groups.count(size) for size in (4, 3, 2, 1))
    ones -= min(ones, threes)
    nodes, odd = fours + threes + twos // 2, twos % 2
    return nodes + odd + math.ceil(max(0, ones - 2 * odd) / 4)


# --- Algorithm 1


@pytest.mark.parametrize("gpus", [1, 2])
def test_phases_placed_apart_are_the_best_of_all_that_brute_force_simulates(gpus: int) -> None:
    problem = make_problem(GpuNodes(num_nodes=1, gpus_per_node=gpus), rate_rps=30.0)
    placement = place_phases(problem, NodeAffinity.HIGH, run_tasks)
    meter = GoodputMeter(WORKLOAD)
    for chosen, phase in zip(placement.chosen, Phase, strict=True):
        goodputs = {
            each: meter.measure(
                GoodputTask(
                    prefill=instance if phase is Phase.PREFILL else None,
                    decode=instance if phase is Phase.DECODE else None,
                    duration_s=120.0,
                )
            )
            for each, instance in problem.instances.items()
        }
        best = max(goodputs, key=lambda each: goodputs[each] / each.num_gpus)
        assert chosen.candidate.parallelism == {phase: best}
        assert chosen.candidate.goodput_rps == goodputs[best] > 0.0
        assert (chosen.num_instances - 1) * goodputs[best] < 30.0 <= chosen.num_instances * goodputs[best]
    assert placement.num_gpus == sum(each.num_instances * each.candidate.num_gpus for each in placement.chosen)
    assert len(placement.candidates) == 2 * len(problem.instances)


@given(data=st.data(), num_nodes=st.integers(1, 2), gpus=st.integers(1, 4), rate_rps=st.floats(0.01, 100.0))
def test_phases_placed_apart_maximize_goodput_per_gpu_whatever_the_goodputs(
    data: st.DataObject, num_nodes: int, gpus: int, rate_rps: float
) -> None:
    problem = make_problem(GpuNodes(num_nodes=num_nodes, gpus_per_node=gpus), rate_rps)
    drawn = st.one_of(st.just(0.0), st.floats(0.1, 50.0))
    goodputs = {
        (phase, each): data.draw(drawn, label=f"{phase} {each}") for phase in Phase for each in problem.instances
    }

    def run(tasks: Sequence[GoodputTask]) -> list[float]:
        found = []
        for task in tasks:
            assert (task.prefill is None) != (task.decode is None)
            instance = task.prefill or task.decode
            assert instance is not None
            found.append(goodputs[Phase.DECODE if task.prefill is None else Phase.PREFILL, instance.parallelism])
        return found

    if any(not any(goodputs[phase, each] for each in problem.instances) for phase in Phase):
        with pytest.raises(NoPlacementError):
            place_phases(problem, NodeAffinity.HIGH, run)
        return
    for chosen, phase in zip(place_phases(problem, NodeAffinity.HIGH, run).chosen, Phase, strict=True):
        best = max(goodputs[phase, each] / each.num_gpus for each in problem.instances)
        assert chosen.candidate.goodput_per_gpu_rps == best
        assert chosen.num_instances == next(
            number for number in itertools.count(1) if number * chosen.candidate.goodput_rps >= rate_rps * (1 - 1e-9)
        )


def test_stages_of_all_instances_are_packed_into_nodes() -> None:
    """Two prefill instances of 2 GPUs and three decode instances of two stages of 1: seven groups in nodes of 3."""
    nodes = GpuNodes(num_nodes=4, gpus_per_node=3)
    problem = make_problem(nodes, rate_rps=6.0)
    best = {Phase.PREFILL: ((2, 1), 3.0), Phase.DECODE: ((1, 2), 2.0)}

    def run(tasks: Sequence[GoodputTask]) -> list[float]:
        found = []
        for task in tasks:
            instance = task.prefill or task.decode
            assert instance is not None
            key, goodput_rps = best[Phase.DECODE if task.prefill is None else Phase.PREFILL]
            found.append(goodput_rps if instance.parallelism == key else 0.0)
        return found

    placement = place_phases(problem, NodeAffinity.HIGH, run)
    assert [each.num_instances for each in placement.chosen] == [2, 3]
    assert (placement.num_gpus, placement.num_nodes) == (10, 4)


# --- Algorithm 2


@given(data=st.data(), num_nodes=st.integers(1, 2), gpus=st.integers(2, 4), rate_rps=st.floats(0.01, 100.0))
def test_pairs_maximize_goodput_per_gpu_whatever_the_goodputs(
    data: st.DataObject, num_nodes: int, gpus: int, rate_rps: float
) -> None:
    """A pair has at most the goodput of its prefill instance; one that does not beat what it must counts as 0."""
    nodes = GpuNodes(num_nodes=num_nodes, gpus_per_node=gpus)
    problem = make_problem(nodes, rate_rps)
    drawn = st.one_of(st.just(0.0), st.floats(0.1, 50.0))
    prefills = {each: data.draw(drawn, label=f"prefill {each}") for each in problem.instances}
    decodes = {each: data.draw(drawn, label=f"decode {each}") for each in problem.instances}
    per_gpu = [0.0]  # of pairs, as they were asked for

    def run(tasks: Sequence[GoodputTask]) -> list[float]:
        found = []
        for task in tasks:
            assert task.prefill is not None
            goodput_rps = prefills[task.prefill.parallelism]
            if task.decode is not None:
                num_gpus = task.prefill.parallelism.num_gpus + task.decode.parallelism.num_gpus
                assert task.beats_rps == max(per_gpu) * num_gpus
                goodput_rps = min(goodput_rps, decodes[task.decode.parallelism])
                per_gpu.append(goodput_rps / num_gpus)
            found.append(goodput_rps if goodput_rps > task.beats_rps else 0.0)
        return found

    best = max(
        min(prefills[pair[Phase.PREFILL]], decodes[pair[Phase.DECODE]])
        / (pair[Phase.PREFILL].num_gpus + pair[Phase.DECODE].num_gpus)
        for pair, _ in list_pairs(nodes, list(problem.instances))
    )
    if best == 0.0:
        with pytest.raises(NoPlacementError):
            place_phases(problem, NodeAffinity.LOW, run)
        return
    placement = place_phases(problem, NodeAffinity.LOW, run)
    (chosen,) = placement.chosen
    candidate = chosen.candidate
    assert candidate.goodput_per_gpu_rps == pytest.approx(best, rel=1e-12)
    assert set(candidate.parallelism) == set(Phase)
    assert chosen.num_instances == math.ceil(rate_rps / candidate.goodput_rps * (1 - 1e-9))
    assert placement.num_gpus == chosen.num_instances * candidate.num_gpus
    per_node = gpus // (candidate.num_gpus // candidate.num_groups)
    assert placement.num_nodes == math.ceil(chosen.num_instances * candidate.num_groups / per_node)


def test_a_pair_is_the_best_of_all_that_brute_force_simulates() -> None:
    """Without the bound, and without giving up: the bound may cost no more than the precision of goodputs."""
    nodes = GpuNodes(num_nodes=1, gpus_per_node=3)
    problem = make_problem(nodes)
    (chosen,) = place_phases(problem, NodeAffinity.LOW, run_tasks).chosen
    meter = GoodputMeter(WORKLOAD)
    per_gpu = [
        meter.measure(
            GoodputTask(
                prefill=problem.instances[pair[Phase.PREFILL]],
                decode=problem.instances[pair[Phase.DECODE]],
                duration_s=120.0,
            )
        )
        / (pair[Phase.PREFILL].num_gpus + pair[Phase.DECODE].num_gpus)
        for pair, _ in list_pairs(nodes, list(problem.instances))
    ]
    assert len(per_gpu) == 5
    assert chosen.candidate.goodput_per_gpu_rps >= max(per_gpu) / 1.02


def test_a_pair_serves_no_more_than_its_prefill_instance_alone() -> None:
    """What the bound of the search rests on, with lengths of runs that the rate chooses."""
    meter = GoodputMeter(WORKLOAD)
    for prefill, decode in itertools.product([Parallelism(1, 1), Parallelism(1, 2), Parallelism(2, 1)], repeat=2):
        alone = meter.measure(GoodputTask(prefill=make_instance(prefill)))
        pair = meter.measure(GoodputTask(prefill=make_instance(prefill), decode=make_instance(decode)))
        assert 0.0 < pair <= alone * 1.02


# --- goodputs


def test_an_instance_that_does_not_beat_a_goodput_counts_as_none() -> None:
    meter, instance = GoodputMeter(WORKLOAD), make_instance(Parallelism(1, 1))
    free = meter.measure(GoodputTask(prefill=instance, duration_s=120.0))
    assert meter.measure(GoodputTask(prefill=instance, duration_s=120.0, beats_rps=free * 1.15)) == 0.0
    assert meter.measure(GoodputTask(prefill=instance, duration_s=120.0, beats_rps=free / 1.15)) == pytest.approx(
        free, rel=0.03
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("parallelism", [(1, 1), (1, 4), (4, 1)])
def test_a_search_begins_near_the_goodput(phase: Phase, parallelism: tuple[int, int]) -> None:
    instance = make_instance(Parallelism(*parallelism))
    is_prefill = phase is Phase.PREFILL
    task = GoodputTask(prefill=instance if is_prefill else None, decode=None if is_prefill else instance)
    goodput_rps = GoodputMeter(WORKLOAD).measure(replace(task, duration_s=120.0))
    assert goodput_rps / 5 < estimate_start_rps(WORKLOAD, task) < 5 * goodput_rps


def test_a_search_of_a_pair_begins_where_that_of_the_slower_instance_does() -> None:
    slow, fast = make_instance(Parallelism(1, 1)), make_instance(Parallelism(1, 4))
    for prefill, decode in itertools.product((slow, fast), repeat=2):
        tasks = GoodputTask(prefill=prefill), GoodputTask(decode=decode), GoodputTask(prefill=prefill, decode=decode)
        first, second, both = (estimate_start_rps(WORKLOAD, task) for task in tasks)
        assert both == min(first, second)
        assert first != second


@pytest.mark.parametrize(
    ("slo", "rate_rps", "duration_s"),
    [
        (Slo(ttft_s=1.0, tpot_s=0.01), 1.0, 600.0),
        (Slo(ttft_s=1.0, tpot_s=0.01), 4.0, 150.0),
        (Slo(ttft_s=1.0, tpot_s=0.01), 60.0, 60.0),
        (Slo(ttft_s=4.0, tpot_s=0.01), 60.0, 100.0),
        (Slo(ttft_s=1.0, tpot_s=2.0), 60.0, 112.0),  # four answers of 14 tokens
        (Slo(ttft_s=60.0, tpot_s=0.01), 60.0, 600.0),
    ],
    ids=["most", "requests", "least", "ttft", "answers", "no longer"],
)
def test_runs_are_as_long_as_rate_and_objectives_ask_for(slo: Slo, rate_rps: float, duration_s: float) -> None:
    assert choose_duration_s(PhaseWorkload(rows=ROWS, slo=slo), rate_rps) == pytest.approx(duration_s)


def test_goodputs_are_means_over_seeds() -> None:
    meter, instance = GoodputMeter(WORKLOAD), make_instance(Parallelism(1, 1))
    both, *single = (
        meter.measure(GoodputTask(prefill=instance, seeds=seeds, duration_s=120.0)) for seeds in ((3, 4), (3,), (4,))
    )
    assert both == pytest.approx(sum(single) / 2)
    assert single[0] != single[1]


@pytest.mark.parametrize(
    ("task", "message"),
    [({}, "a prefill instance, a decode instance, or both"), ({"prefill": 1, "seeds": ()}, "seeds is empty")],
)
def test_a_wrong_task_is_refused(task: dict[str, object], message: str) -> None:
    if "prefill" in task:
        task = {**task, "prefill": make_instance(Parallelism(1, 1))}
    with pytest.raises(ValueError, match=message):
        GoodputTask(**task)  # type: ignore[arg-type]


# --- edges


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate_rps: float) -> None:
    with pytest.raises(ValueError, match=f"^rate_rps is {rate_rps}; it is above 0 and finite"):
        make_problem(GpuNodes(num_nodes=1, gpus_per_node=1), rate_rps)


@pytest.mark.parametrize("name", ["num_nodes", "gpus_per_node"])
def test_nodes_without_gpus_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; at least 1"):
        GpuNodes(**{"num_nodes": 1, "gpus_per_node": 1, name: 0})


@pytest.mark.parametrize("affinity", NodeAffinity)
@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (
            Slo(ttft_s=0.1, tpot_s=9.0),
            (
                "meets a TTFT of 100 ms and a TPOT of 9000 ms for 0.9 of the requests at any rate; "
                r"TP 3 PP 1 comes closest and needs a TTFT of \d+\.?\d* ms even when it idles"
            ),
        ),
        (Slo(ttft_s=9.0, tpot_s=0.02), r"TP 3 PP 1 comes closest and needs a TPOT of \d+\.?\d* ms even when"),
    ],
    ids=["ttft", "tpot"],
)
def test_objectives_that_nothing_meets_are_refused_with_what_idle_instances_need(
    affinity: NodeAffinity, slo: Slo, message: str
) -> None:
    workload = PhaseWorkload(rows=ROWS, slo=slo)
    problem = make_problem(GpuNodes(num_nodes=1, gpus_per_node=3), workload=workload)
    meter = GoodputMeter(workload)
    with pytest.raises(NoPlacementError, match=message):
        place_phases(problem, affinity, lambda tasks: [meter.measure(task) for task in tasks])


def test_the_message_names_what_the_slowest_of_those_that_count_needs() -> None:
    """Nine tenths of 19 prompts are 18: the longest of them has 720 tokens."""
    workload = PhaseWorkload(rows=ROWS, slo=Slo(ttft_s=1.0, tpot_s=9.0))
    problem = make_problem(GpuNodes(num_nodes=1, gpus_per_node=1), workload=workload)
    with pytest.raises(NoPlacementError, match="TP 1 PP 1 comes closest and needs a TTFT of 1640 ms even when it idle"):
        place_phases(problem, NodeAffinity.HIGH, lambda tasks: [0.0] * len(tasks))


def test_an_objective_of_what_idle_instances_need_is_met() -> None:
    """The message's figure is one that a user can go by."""
    instance = make_instance(Parallelism(1, 1))
    needed_s = sorted(0.2 + 2e-3 * (-(-row.prompt_tokens // 8) * 8) for row in ROWS)[math.ceil(0.9 * len(ROWS)) - 1]
    for factor, is_met in ((1.02, True), (0.85, False)):
        workload = PhaseWorkload(rows=ROWS, slo=Slo(ttft_s=needed_s * factor, tpot_s=9.0))
        goodput_rps = GoodputMeter(workload).measure(GoodputTask(prefill=instance, duration_s=4000.0))
        assert (goodput_rps > 0.01) is is_met


@pytest.mark.parametrize(("duration_s", "shown"), [(2.0, "2"), (None, "600")])
def test_runs_too_short_to_say_anything_are_named_as_the_reason(duration_s: float | None, shown: str) -> None:
    problem = replace(make_problem(GpuNodes(num_nodes=1, gpus_per_node=1)), duration_s=duration_s)
    with pytest.raises(NoPlacementError, match=f"that brings 30 requests into runs of {shown} s; longer ones show"):
        place_phases(problem, NodeAffinity.HIGH, lambda tasks: [0.0] * len(tasks))


def test_one_gpu_holds_no_pair() -> None:
    problem = make_problem(GpuNodes(num_nodes=2, gpus_per_node=1))
    with pytest.raises(NoPlacementError, match="no prefill and decode instance fit into nodes of 1 GPUs together"):
        place_phases(problem, NodeAffinity.LOW, run_tasks)


def test_nothing_to_choose_from_is_refused() -> None:
    nodes = GpuNodes(num_nodes=1, gpus_per_node=1)
    problem = PlacementProblem(workload=WORKLOAD, instances={}, nodes=nodes, rate_rps=1.0)
    with pytest.raises(NoPlacementError, match="no parallelism is left"):
        place_phases(problem, NodeAffinity.HIGH, run_tasks)
