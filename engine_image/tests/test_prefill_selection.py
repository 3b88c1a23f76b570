"""FlowPrefill on engines: an urgent prompt preempts one that has started, at the end of an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_harness import make_prompt, run_alone, wait

from sluice_engine.core_messages import RequestExtras

if TYPE_CHECKING:
    from engine_harness import Engine, Part

pytestmark = pytest.mark.engine
# Hours apart, so that no machine is too slow for any of them.
PATIENT, URGENT = RequestExtras(ttft_slo_s=36_000.0), RequestExtras(ttft_slo_s=3600.0)


def count_prefill_tokens(engine: Engine) -> int:
    return sum(report.iteration.prefill_tokens for report in engine.reports if report.iteration is not None)


def submit_long(engine: Engine, number: int, *, tokens: int) -> list[Part]:
    """Submits prompts of seconds, and waits until the first has started."""
    parts = [engine.submit(make_prompt(tokens, salt=salt), max_tokens=4, extras=PATIENT) for salt in range(number)]
    wait([engine], lambda: count_prefill_tokens(engine) > 0)
    return parts


@pytest.mark.parametrize("strategy", ["flowprefill", "aggregated"])
@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_an_urgent_prompt_preempts_a_started_one_and_nothing_is_computed_twice(
    kind: str, strategy: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(kind)[0]
    engine.configure(512)
    expected = [run_alone(engine, make_prompt(1900, salt=salt), max_tokens=4).tokens for salt in range(4)]
    expected_urgent = run_alone(engine, make_prompt(200, salt=9), max_tokens=4).tokens
    before = engine.load().num_suspended_prefills
    # The policy changes while prompts run and wait.
    engine.configure(16)
    engine.reports.clear()
    long = submit_long(engine, 4, tokens=1900)
    engine.configure(16, strategy=strategy)
    urgent = engine.submit(make_prompt(200, salt=9), max_tokens=4, extras=URGENT)
    wait([engine], lambda: urgent.is_over)
    was_first = not all(part.tokens for part in long)
    wait([engine], lambda: all(part.is_over for part in long))
    assert was_first is (strategy == "flowprefill")
    assert (engine.load().num_suspended_prefills > before) is (strategy == "flowprefill")
    assert [part.tokens for part in long] == expected
    assert urgent.tokens == expected_urgent
    assert count_prefill_tokens(engine) == 4 * 1900 + 200


def test_a_selected_prompt_that_finds_no_blocks_lets_started_ones_go_on(small_pair: tuple[Engine, Engine]) -> None:
    """39 blocks of 16 tokens: neither two prompts of 400 tokens fit, nor one of 600 beside anything."""
    engine = small_pair[0]
    engine.configure(512)
    sizes = [400, 400, 600]
    expected = [run_alone(engine, make_prompt(size, salt=salt), max_tokens=4).tokens for salt, size in enumerate(sizes)]
    engine.configure(16, strategy="flowprefill")
    engine.reports.clear()
    parts = submit_long(engine, 1, tokens=400)
    parts += [
        engine.submit(make_prompt(size, salt=salt), max_tokens=4, extras=RequestExtras(ttft_slo_s=3600.0 / salt))
        for salt, size in enumerate(sizes)
        if salt
    ]
    wait([engine], lambda: all(part.is_over for part in parts))
    assert [part.tokens for part in parts] == expected
