"""Roles are sticky and change by the fewest flips."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_core.records import EngineId, Role
from sluice_operator.api.manifest import check_manifest
from sluice_operator.api.sliders import Sliders, count_prefill_heavy, resolve_sliders
from sluice_operator.planning.roles import assign_roles, decide_roles

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
NAMES = [EngineId(f"e{index}") for index in range(8)]


@pytest.mark.parametrize(
    ("current", "engines", "count", "expected"),
    [
        ({}, "abcd", 2, "PPDD"),
        ({"a": D, "b": P}, "ab", 1, "DP"),
        ({"a": D, "b": P}, "abc", 1, "DPD"),
        ({"a": D, "b": D}, "abc", 1, "DDP"),
        ({"a": P, "b": P, "c": D}, "abc", 1, "DPD"),
        ({"a": D, "b": D, "c": D}, "abc", 1, "PDD"),
        ({"a": P, "gone": P}, "ab", 2, "PP"),
        ({}, "ab", 9, "PP"),
        ({"a": P}, "a", 0, "D"),
    ],
    ids=["fresh", "kept", "new fills D", "new fills P", "least flips to D", "least flips to P", "gone", "all", "none"],
)
def test_roles(current: dict[EngineId, Role], engines: str, count: int, expected: str) -> None:
    roles = assign_roles(current, [EngineId(name) for name in engines], count)
    assert "".join("P" if role is P else "D" for role in roles.values()) == expected


def test_the_least_loaded_engine_flips() -> None:
    current = {EngineId("a"): D, EngineId("b"): D}
    loads = {EngineId("a"): 5, EngineId("b"): 2}
    assert assign_roles(current, list(current), 1, loads) == {"a": D, "b": P}
    assert assign_roles({EngineId("a"): P, EngineId("b"): P}, list(current), 1, loads) == {"a": P, "b": D}


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([P, D])),
    st.lists(st.sampled_from(NAMES), unique=True),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)),
)
def test_counts_are_right_and_flips_are_fewest(
    current: dict[EngineId, Role], engines: list[EngineId], count: int, loads: dict[EngineId, int]
) -> None:
    roles = assign_roles(current, engines, count, loads)
    wanted = min(count, len(engines))
    assert list(roles) == engines
    assert sum(role is P for role in roles.values()) == wanted
    kept = [current[engine] for engine in engines if engine in current]
    flips = sum(engine in current and current[engine] is not roles[engine] for engine in engines)
    has_p, has_d = kept.count(P), kept.count(D)
    assert flips == max(0, has_p - wanted, has_d - (len(engines) - wanted))
    assert assign_roles(roles, engines, count, loads) == roles


@pytest.mark.parametrize(
    ("num_prefill_heavy", "decode_heavy_tokens", "replicas", "before", "serving", "expected"),
    [
        pytest.param(4, 64, 8, "PPDD", "abcd", "PPDD", id="scaled up: the mix stays while the others load"),
        pytest.param(4, 64, 8, "PPDD", "abcde", "PPDDP", id="one joins"),
        pytest.param(4, 64, 8, "PPDDP", "abcdefgh", "PPDDPPDD", id="the rest joins"),
        pytest.param(2, 64, 8, "PPDDDDDD", "ab", "DP", id="six are lost: both kinds stay"),
        pytest.param(4, 64, 8, "PPPPDDDD", "abcd", "DDPP", id="half are lost, all of one kind"),
        pytest.param(4, 64, 8, "PPPPDDDD", "abcefgh", "PPPDDDD", id="one is away: nobody changes"),
        pytest.param(1, 64, 2, "PD", "b", "D", id="the last one keeps its role"),
        pytest.param(1, 0, 8, "PDDDDDDD", "h", "P", id="the last one takes prefills where D-heavy ones do not"),
        pytest.param(0, 64, 4, "DDDD", "ab", "DD", id="none is P-heavy"),
        pytest.param(4, 64, 4, "PPPP", "ab", "PP", id="all are P-heavy"),
        pytest.param(2, 64, 4, "", "a", "P", id="the first of a new fleet"),
    ],
)
def test_the_mix_counts_over_the_engines_that_serve(
    num_prefill_heavy: int, decode_heavy_tokens: int, replicas: int, before: str, serving: str, expected: str
) -> None:
    names = dict(zip("abcdefgh", before, strict=False))
    current = {EngineId(name): Role.PREFILL_HEAVY if kind == "P" else D for name, kind in names.items()}
    away = [engine for engine in current if engine not in serving]
    sliders = Sliders(
        num_prefill_heavy=num_prefill_heavy, prefill_heavy_tokens=512, decode_heavy_tokens=decode_heavy_tokens
    )
    roles = decide_roles(
        current, [EngineId(name) for name in serving], away, sliders=sliders, replicas=replicas, loads={}
    )
    assert "".join("P" if roles[EngineId(name)] is P else "D" for name in serving) == expected
    assert {engine: roles[engine] for engine in away} == {engine: current[engine] for engine in away}


@pytest.mark.parametrize(
    ("wanted", "replicas", "needs_both", "expected"),
    [
        ("50%", 4, False, 2),
        ("50%", 5, False, 3),
        ("50%", 1, False, 1),
        ("10%", 5, False, 1),
        ("9%", 5, False, 0),
        ("0%", 4, False, 0),
        ("100%", 4, False, 4),
        (3, 4, False, 3),
        ("0%", 4, True, 1),
        ("100%", 4, True, 3),
        (4, 4, True, 3),
        (0, 2, True, 1),
    ],
)
def test_counts_round_half_up_and_leave_both_roles_where_needed(
    wanted: int | str, replicas: int, *, needs_both: bool, expected: int
) -> None:
    assert count_prefill_heavy(wanted, replicas, needs_both_roles=needs_both) == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("TaiChi", (2, 512, 64)),
        ("Aggregated", (2, 512, 512)),
        ("Disaggregated", (2, 4096, 0)),
        ("DynaServe", (2, 4096, 4096)),
        ("EcoServe", (2, 4096, 4096)),
        ("Sluice", (2, 4096, 4096)),
    ],
)
def test_strategies_are_settings_of_the_sliders(strategy: str, expected: tuple[int, int, int]) -> None:
    spec = check_manifest(
        {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "ServingCluster",
            "metadata": {"name": "test"},
            "spec": {
                "replicas": 4,
                "strategy": strategy,
                "chunkSizes": {"prefillHeavy": 512, "decodeHeavy": 64},
                "slo": {"ttftMilliseconds": 500, "tpotMilliseconds": 50},
                "model": {"name": "m", "source": {"huggingFace": {}}},
                "engine": {"maxBatchTokens": 4096},
            },
        }
    ).spec
    sliders = resolve_sliders(spec)
    assert (sliders.num_prefill_heavy, sliders.prefill_heavy_tokens, sliders.decode_heavy_tokens) == expected
