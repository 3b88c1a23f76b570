"""The space of plans: lattices, bounds and neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_harness import make_problem, make_space, make_taichi

from sluice_core.planning.slider_candidates import PrefillHeavyBounds, list_chunk_sizes, resize
from sluice_core.planning.slider_steps import list_coarse, list_neighbours, list_parameter_neighbours, list_smaller
from sluice_core.planning.trials import build_cell
from sluice_core.records import Role
from sluice_core.strategies import STRATEGIES

# --- what may be chosen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "extra", "sizes"),
    [
        (64, 512, (), (64, 96, 128, 192, 256, 384, 512)),
        (0, 128, (100,), (0, 64, 96, 100, 128)),
        (200, 300, (999,), (200, 256, 300)),
        (16, 50, (), (16, 50)),
        (0, 8, (), (0,)),
    ],
    ids=["lattice", "with one in force", "bounds between", "below the lattice", "none but 0"],
)
def test_chunk_sizes_are_the_lattice_the_bounds_and_what_is_in_force(low, high, extra, sizes) -> None:
    assert list_chunk_sizes(low, high, extra) == sizes


def test_bounds_without_a_chunk_size_are_refused() -> None:
    with pytest.raises(ValueError, match="no chunk size is within 3 to 9"):
        list_chunk_sizes(3, 9)


@pytest.mark.parametrize(
    ("bounds", "replicas", "counts"),
    [
        (PrefillHeavyBounds(), 4, (1, 3)),
        (PrefillHeavyBounds(low=26, high=50), 8, (3, 4)),
        (PrefillHeavyBounds(low=2, high=9, is_percent=False), 4, (2, 3)),
        (PrefillHeavyBounds(low=5, high=9, is_percent=False), 4, None),
        (PrefillHeavyBounds(), 1, None),
    ],
    ids=["all", "shares are rounded inwards", "counts", "too many", "one engine"],
)
def test_prefill_heavy_bounds_leave_an_engine_of_each_role(bounds, replicas, counts) -> None:
    assert bounds.resolve(replicas) == counts


@pytest.mark.parametrize("replicas", [1, 2, 4, 64])
def test_coarse_candidates_are_within_the_bounds_and_of_every_strategy(replicas) -> None:
    space = make_space()
    coarse = list_coarse(space, replicas, 1)
    assert all(space.contains(candidate) and candidate.replicas == replicas for candidate in coarse)
    assert len(set(coarse)) == len(coarse)
    assert {candidate.strategy for candidate in coarse} == (
        set(STRATEGIES) if replicas > 1 else {"aggregated", "dynaserve", "ecoserve", "sluice"}
    )


def test_neighbours_reach_every_candidate_of_the_space() -> None:
    space = make_space()
    reached = {make_taichi()}
    while fresh := {moved for one in reached for moved in list_neighbours(space, one)} - reached:
        reached |= fresh
    assert reached == {
        make_taichi(
            num_prefill_heavy=count,
            num_decode_heavy=4 - count,
            prefill_heavy_tokens=prefill,
            decode_heavy_tokens=decode,
        )
        for count in (1, 2, 3)
        for prefill in space.prefill_heavy_tokens
        for decode in space.decode_heavy_tokens
    }


def test_aggregation_has_one_slider_and_disaggregation_another() -> None:
    space = make_space()
    aggregated = space.make_candidate("aggregated", 4, 1, prefill_heavy_tokens=512)
    assert {(one.num_prefill_heavy, one.prefill_heavy_tokens) for one in list_neighbours(space, aggregated)} == {
        (4, 256),
        (4, 1024),
    }
    disaggregated = space.make_candidate("disaggregated", 4, 1, num_prefill_heavy=2)
    assert {(one.num_prefill_heavy, one.prefill_heavy_tokens) for one in list_neighbours(space, disaggregated)} == {
        (1, 2048),
        (3, 2048),
    }
    assert not list_parameter_neighbours(space, aggregated)


@pytest.mark.parametrize("strategy", ["disaggregated", "dynaserve", "ecoserve", "sluice"])
def test_no_step_is_taken_on_a_slider_that_a_strategy_lacks(strategy) -> None:
    """A plan in force may have other chunk sizes than the search would give it."""
    space = make_space(decode_heavy_tokens=(0, 64, 128))
    in_force = replace(
        space.make_candidate(strategy, 4, 1, num_prefill_heavy=2), prefill_heavy_tokens=1024, decode_heavy_tokens=64
    )
    assert not list_neighbours(space, in_force)
    assert not list_smaller(space, in_force, of_prefill_heavy=True)
    assert not list_smaller(space, in_force, of_prefill_heavy=False)


def test_smaller_chunks_are_listed_as_far_as_the_bounds() -> None:
    space = make_space(decode_heavy_tokens=(0, 64, 128))
    candidate = make_taichi(prefill_heavy_tokens=1024)
    smaller = list_smaller(space, candidate, of_prefill_heavy=True)
    assert smaller == [replace(candidate, prefill_heavy_tokens=tokens) for tokens in (512, 256)]
    smaller = list_smaller(space, candidate, of_prefill_heavy=False)
    assert smaller == [replace(candidate, decode_heavy_tokens=tokens) for tokens in (64, 0)]
    aggregated = space.make_candidate("aggregated", 4, 1, prefill_heavy_tokens=512)
    assert not list_smaller(space, aggregated, of_prefill_heavy=False)


def test_resizing_keeps_the_share_and_the_bounds() -> None:
    space = make_space(prefill_heavy=PrefillHeavyBounds(low=1, high=3, is_percent=False))
    resized = resize(make_taichi(), 16, space)
    assert resized is not None
    assert (resized.num_prefill_heavy, resized.num_decode_heavy) == (3, 13)


@pytest.mark.parametrize(("replicas", "num_prefill_heavy"), [(3, 1), (4, 1), (5, 2), (7, 2), (8, 3)])
def test_a_share_is_kept_to_the_nearest_engine(replicas, num_prefill_heavy) -> None:
    resized = resize(make_taichi(num_prefill_heavy=1), replicas, make_space())
    assert resized is not None
    assert resized.num_prefill_heavy == num_prefill_heavy


def test_a_cell_has_the_candidates_engines() -> None:
    cell = build_cell(make_problem(), make_taichi(watermark=0.9, approaching_factor=0.8), seed=3, kv_scale=0.5)
    assert [(e.engine_id, e.role, e.chunk_size_tokens, e.kv_blocks_total) for e in cell.engines] == [
        ("p0", Role.PREFILL_HEAVY, 512, 2000),
        ("p1", Role.PREFILL_HEAVY, 512, 2000),
        ("d0", Role.DECODE_HEAVY, 128, 2000),
        ("d1", Role.DECODE_HEAVY, 128, 2000),
    ]
    assert (cell.parameters.watermark, cell.parameters.approaching_factor, cell.seed) == (0.9, 0.8, 3)


@pytest.mark.parametrize(
    ("low", "high", "replicas", "counts"),
    [
        (50, 50, 4, (2, 2)),
        (51, 74, 4, None),
        (25, 75, 8, (2, 6)),
        (26, 74, 8, (3, 5)),
        (0, 100, 3, (1, 2)),
        (34, 66, 3, None),
        (33, 67, 3, (1, 2)),
    ],
)
def test_percent_are_whole_engines_within_the_bounds(low, high, replicas, counts) -> None:
    assert PrefillHeavyBounds(low=low, high=high).resolve(replicas) == counts


@pytest.mark.parametrize(
    ("low", "high", "replicas", "percent"),
    [(3, 5, 20, (15, 25)), (1, 2, 24, (4, 9)), (7, 23, 24, (29, 96)), (40, 40, 40, (100, 100))],
)
def test_counts_scale_to_shares_that_are_no_narrower(low, high, replicas, percent) -> None:
    scaled = PrefillHeavyBounds(low=low, high=high, is_percent=False).scale(replicas)
    assert (scaled.low, scaled.high, scaled.is_percent) == (*percent, True)
    as_percent = PrefillHeavyBounds(low=low, high=high)
    assert as_percent.scale(replicas) is as_percent


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("strategies", "strategies"),
        ("prefill_heavy_tokens", "chunk sizes of P-heavy engines"),
        ("decode_heavy_tokens", "chunk sizes of D-heavy engines"),
        ("watermarks", "watermarks"),
        ("approaching_factors", "approaching factors"),
    ],
)
def test_a_space_without_a_choice_is_refused_by_name(field, name) -> None:
    with pytest.raises(ValueError, match=f"^there are no {name} to choose from$"):
        make_space(**{field: ()})
