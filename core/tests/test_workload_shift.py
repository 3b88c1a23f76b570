"""When a plan no longer fits the workload."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_core.planning.workload_shift import SHIFT_RATIO, MeanEstimate, WorkloadMeans, estimate_means, find_shifts

MANY = 100_000


def make_means(*, rate_rps: float = 2.0, prompt: int = 1000, output: int = 100, num: int = MANY) -> WorkloadMeans:
    return estimate_means([prompt] * num, [output] * num, rate_rps)


@pytest.mark.parametrize(
    ("recent", "shifts"),
    [
        ({}, ()),
        ({"rate_rps": 2.4, "prompt": 1200, "output": 82}, ()),
        ({"rate_rps": 2.6}, ("rate_rps",)),
        ({"prompt": 1260}, ("prompt_tokens",)),
        ({"output": 79}, ("output_tokens",)),
        ({"rate_rps": 1.0, "prompt": 10, "output": 999}, ("rate_rps", "prompt_tokens", "output_tokens")),
    ],
)
def test_means_that_differ_by_more_than_a_quarter_have_shifted(recent: dict, shifts: tuple[str, ...]) -> None:
    assert find_shifts(make_means(), make_means(**recent)) == shifts


def test_a_few_requests_say_too_little_about_a_rate() -> None:
    assert find_shifts(make_means(num=30), make_means(rate_rps=3.0, num=30)) == ()


@pytest.mark.parametrize(("ratio", "differs"), [(1.63, False), (1.67, True), (1 / 1.63, False), (1 / 1.67, True)])
def test_a_shift_goes_beyond_two_standard_errors_of_both_means_together(ratio: float, *, differs: bool) -> None:
    # 1.25 * exp(2 * 0.14): 0.14 is what errors of 0.1 and 0.1 make together.
    one, other = MeanEstimate(mean=1.0, error=0.1), MeanEstimate(mean=ratio, error=0.1)
    assert one.differs(other) is differs


def test_lengths_that_vary_need_more_requests_to_show_a_shift() -> None:
    for num, shifts in ((10, ()), (10_000, ("prompt_tokens",))):
        old = estimate_means([100, 1900] * num, [100] * 2 * num, 2.0)
        new = estimate_means([200, 2600] * num, [100] * 2 * num, 2.0)
        assert find_shifts(old, new) == shifts


@given(mean=st.floats(1e-3, 1e6), factor=st.floats(1e-3, 1e3), errors=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_shift_is_one_whichever_workload_comes_first(mean: float, factor: float, errors: tuple[float, float]) -> None:
    one, other = MeanEstimate(mean=mean, error=errors[0]), MeanEstimate(mean=mean * factor, error=errors[1])
    assert one.differs(other) is other.differs(one)
    if one.differs(other):
        assert abs(math.log(factor)) > math.log(SHIFT_RATIO)


def test_nothing_differs_from_anything_but_itself() -> None:
    nothing, something = MeanEstimate(mean=0.0, error=9.0), MeanEstimate(mean=1e-6, error=9.0)
    assert nothing.differs(something)
    assert something.differs(nothing)
    assert not nothing.differs(nothing)
