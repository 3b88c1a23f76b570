"""EcoServe on engines: an iteration holds prefills or decodes, and every token is that of a request alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from engine_harness import make_prompt, run_alone, wait

from sluice_engine.core_messages import RequestExtras

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine
EXTRAS = RequestExtras(ttft_slo_s=36_000.0, tpot_slo_s=3600.0)


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_decodes_wait_for_prefills_and_every_token_is_exact(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)[0]
    engine.configure(64)
    sizes = [40, 200, 90, 150, 30, 260, 70, 120]
    expected = [
        run_alone(engine, make_prompt(size, salt=salt), max_tokens=24).tokens for salt, size in enumerate(sizes)
    ]
    engine.configure(64, strategy="ecoserve")
    before = engine.load().num_phase_switches
    engine.reports.clear()
    parts = []
    saved_s = []
    for salt, size in enumerate(sizes):
        parts.append(engine.submit(make_prompt(size, salt=salt), max_tokens=24, extras=EXTRAS))
        # The next prompt comes while those before it decode.
        wait([engine], lambda: len(parts[-1].tokens) >= 3)
        saved_s.append(engine.load().saved_tpot_s)
    wait([engine], lambda: all(part.is_over for part in parts))
    assert [part.tokens for part in parts] == expected
    iterations = [report.iteration for report in engine.reports if report.iteration is not None]
    assert sum(one.prefill_tokens for one in iterations) == sum(sizes)
    assert not any(one.prefill_tokens and one.num_decodes for one in iterations)
    assert engine.load().num_phase_switches - before >= 2 * len(sizes) - 1
    # Hours per token are allowed, so that nearly all of them are saved.
    assert all(saved is not None and saved > 3600.0 for saved in saved_s)
    load = engine.load()
    assert (load.prefill_phase_s, load.saved_tpot_s, load.decode_context_tokens) == (0.0, None, 0)


def test_a_phase_of_prefills_is_reported_with_its_age(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(16, strategy="ecoserve")
    part = engine.submit(make_prompt(2000), max_tokens=2, extras=EXTRAS)
    wait([engine], lambda: engine.load().queued_prefill_tokens < 1900)
    first_s = engine.load().prefill_phase_s
    started_s = time.monotonic()
    wait([engine], lambda: engine.load().queued_prefill_tokens < 1000)
    later_s = engine.load().prefill_phase_s
    assert 0.0 < first_s < later_s <= first_s + time.monotonic() - started_s + 0.1
    wait([engine], lambda: part.is_over)


def test_decodes_go_on_where_prompts_find_no_blocks(small_pair: tuple[Engine, Engine]) -> None:
    """39 blocks of 16 tokens: no two of these prompts fit at a time."""
    engine = small_pair[0]
    engine.configure(512)
    sizes = [400, 420, 380]
    expected = [
        run_alone(engine, make_prompt(size, salt=salt), max_tokens=12).tokens for salt, size in enumerate(sizes)
    ]
    engine.configure(512, strategy="ecoserve")
    engine.reports.clear()
    parts = [
        engine.submit(make_prompt(size, salt=salt), max_tokens=12, extras=EXTRAS) for salt, size in enumerate(sizes)
    ]
    wait([engine], lambda: all(part.is_over for part in parts))
    assert [part.tokens for part in parts] == expected


@pytest.mark.parametrize("after", ["aggregated", "sluice", "flowprefill"])
def test_phases_end_with_a_live_switch(pair: tuple[Engine, Engine], after: str) -> None:
    engine = pair[0]
    engine.configure(64)
    sizes = [300, 500, 400]
    expected = [
        run_alone(engine, make_prompt(size, salt=salt), max_tokens=40).tokens for salt, size in enumerate(sizes)
    ]
    engine.configure(16, strategy="ecoserve")
    first = engine.submit(make_prompt(sizes[0]), max_tokens=40, extras=EXTRAS)
    wait([engine], lambda: len(first.tokens) >= 2)
    others = [
        engine.submit(make_prompt(size, salt=salt), max_tokens=40, extras=EXTRAS) for salt, size in ((1, 500), (2, 400))
    ]
    wait([engine], lambda: 0 < engine.load().queued_prefill_tokens < 900)  # the others have begun
    num_tokens = len(first.tokens)
    wait([engine], lambda: engine.load().queued_prefill_tokens < 700)
    assert len(first.tokens) <= num_tokens + 2  # it has waited since
    engine.configure(64, strategy=after)
    engine.reports.clear()
    wait([engine], lambda: all(part.is_over for part in (first, *others)))
    assert [part.tokens for part in (first, *others)] == expected
    assert any(
        report.iteration is not None and report.iteration.prefill_tokens and report.iteration.num_decodes
        for report in engine.reports
    )
