"""Algorithm 1 inside the engine: which decodes are proposed, and why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from engine_harness import BLOCK_SIZE, make_prompt, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine

SLACK = {"extras": core_messages.RequestExtras(tpot_slo_s=10.0)}


def proposals(engine: Engine) -> list[core_messages.ProposedMove]:
    return [proposal for report in engine.reports for proposal in report.proposals]


def test_p_heavy_engine_proposes_a_request_when_its_prefill_is_done(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(256, role="P-heavy", strategy="TaiChi")
    part = engine.submit(make_prompt(300), max_tokens=300, **SLACK)
    wait([engine], lambda: bool(proposals(engine)))
    first = proposals(engine)[0]
    assert (first.request_id, first.cause) == (part.request_id, "prefill_done")
    assert first.num_output_tokens >= 1
    assert first.num_blocks >= 300 // BLOCK_SIZE
    engine.abort(part)


def test_d_heavy_engine_decodes_in_place(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(256, role="D-heavy", strategy="TaiChi")
    part = engine.submit(make_prompt(300), max_tokens=60, **SLACK)
    wait([engine], lambda: part.is_over)
    assert proposals(engine) == []


def test_aggregated_engines_propose_nothing(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(256, role="P-heavy", strategy="Aggregated")
    part = engine.submit(make_prompt(300), max_tokens=60, extras=core_messages.RequestExtras(tpot_slo_s=1e-6))
    wait([engine], lambda: part.is_over)
    assert proposals(engine) == []


def test_d_heavy_engine_above_the_watermark_proposes_its_longest_output(small_pair: tuple[Engine, Engine]) -> None:
    engine = small_pair[0]
    engine.configure(
        256,
        role="D-heavy",
        strategy="TaiChi",
        parameters={"watermark_percent": "50", "min_tokens_between_moves": "1"},
    )
    old = engine.submit(make_prompt(8 * BLOCK_SIZE), max_tokens=200, **SLACK)
    wait([engine], lambda: len(old.tokens) > 20)
    young = engine.submit(make_prompt(8 * BLOCK_SIZE, salt=1), max_tokens=200, **SLACK)
    third = engine.submit(make_prompt(8 * BLOCK_SIZE, salt=2), max_tokens=200, **SLACK)
    wait([engine], lambda: bool(proposals(engine)))
    assert (proposals(engine)[0].request_id, proposals(engine)[0].cause) == (old.request_id, "degrade")
    engine.abort(old, young, third)


def test_p_heavy_engine_sends_a_moved_in_decode_back_when_its_tpot_nears_the_objective(
    pair: tuple[Engine, Engine],
) -> None:
    source, target = pair
    prompt = make_prompt(100)
    target.configure(256, role="P-heavy", strategy="TaiChi")
    part = source.submit(prompt, max_tokens=300)
    wait([source], lambda: len(part.tokens) > 2)
    source.command(core_messages.HandOffCommand(request_id=part.request_id))
    wait([source], lambda: part.is_over)
    extras = core_messages.RequestExtras(
        output_token_ids=part.tokens,
        transfer_params=part.handed_off.transfer_params,
        first_token_s=time.monotonic() - 100.0,
        tpot_slo_s=0.05,
    )
    moved = target.submit(prompt, max_tokens=300, extras=extras)
    wait(pair, lambda: bool(proposals(target)))
    assert (proposals(target)[0].request_id, proposals(target)[0].cause) == (moved.request_id, "backflow")
    assert proposals(target)[0].num_output_tokens >= len(part.tokens)
    target.abort(moved)


def test_preempted_request_that_was_to_hand_off_is_refused_and_goes_on(small_pair: tuple[Engine, Engine]) -> None:
    """Hand-offs and preemptions race; whatever happens, every request ends once, here or there."""
    engine, target = small_pair
    parts = [engine.submit(make_prompt(6 * BLOCK_SIZE, salt=index), max_tokens=200) for index in range(4)]
    wait([engine], lambda: all(part.tokens for part in parts))
    following = []
    for index, part in enumerate(parts):
        wait([engine], lambda: len(part.tokens) > 100 or part.is_over)  # noqa: B023
        if not target.grant(f"g{index}", 14 * BLOCK_SIZE, ttl_s=0.5).is_granted or part.is_over:
            continue
        if engine.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted:
            following.append(part)
    wait(
        small_pair,
        lambda: all(part.is_over or part.request_id in {no.request_id for no in engine.refused} for part in following),
    )
    for part in following:
        if part.handed_off is not None:
            engine.command(core_messages.ReleaseCommand(request_id=part.request_id))
    wait(small_pair, lambda: all(part.is_over for part in parts))
    refused = {no.request_id for no in engine.refused}
    moved = {part.request_id for part in following if part.handed_off is not None}
    assert not refused & moved
    # What has not moved ends here, with all its tokens.
    assert all(len(part.tokens) == 200 for part in parts if part.request_id not in moved)
