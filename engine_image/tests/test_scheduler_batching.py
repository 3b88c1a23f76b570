"""What an iteration holds: the chunk size live, who goes first, and that nobody waits for ever."""

from __future__ import annotations

import time
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import BLOCK_SIZE, MAX_BATCH_TOKENS, make_prompt, move, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine


def iterations(engine: Engine) -> list[core_messages.IterationReport]:
    return [report.iteration for report in engine.reports if report.iteration is not None]


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_iteration_never_exceeds_the_chunk_size(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)[0]
    engine.configure(64)
    parts = [engine.submit(make_prompt(300, salt=index), max_tokens=30) for index in range(4)]
    wait([engine], lambda: all(part.is_over for part in parts))
    shapes = iterations(engine)
    assert max(shape.prefill_tokens + shape.num_decodes for shape in shapes) == 64
    assert sum(shape.prefill_tokens for shape in shapes) == 4 * 300


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_a_decode_that_has_ended_leaves_its_room_to_prefills_at_once(kind: str, request: pytest.FixtureRequest) -> None:
    """Also when its last token is still under way while the next iteration is scheduled."""
    engine: Engine = request.getfixturevalue(kind)[0]
    engine.configure(64)
    short = [engine.submit(make_prompt(20, salt=index), max_tokens=4 + index) for index in range(3)]
    long = engine.submit(make_prompt(1200, salt=9), max_tokens=2)
    wait([engine], lambda: long.is_over and all(part.is_over for part in short))
    shapes = [shape for shape in iterations(engine) if shape.prefill_tokens]
    # Before the long prompt came, chunks were not full; its last one is not either.
    *full, _ = dropwhile(lambda shape: shape.prefill_tokens + shape.num_decodes < 64, shapes)
    assert {shape.prefill_tokens + shape.num_decodes for shape in full} == {64}
    assert max(shape.num_decodes for shape in full) > full[-1].num_decodes == 0


def test_chunk_size_is_in_force_at_the_next_iteration(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(32)
    part = engine.submit(make_prompt(1600), max_tokens=4)
    wait([engine], lambda: len(iterations(engine)) >= 3)
    assert engine.configure(256) == core_messages.ConfigureAnswer(
        generation=engine.generation, role="D-heavy", chunk_size_tokens=256
    )
    wait([engine], lambda: part.is_over)
    sizes = [shape.prefill_tokens for shape in iterations(engine) if shape.prefill_tokens]
    change = sizes.index(256)
    assert set(sizes[:change]) == {32}
    assert set(sizes[change:-1]) == {256}
    for report in engine.reports:
        if report.iteration and report.iteration.prefill_tokens == 256:
            assert report.load.generation == engine.generation


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"chunk_size_tokens": MAX_BATCH_TOKENS + 1}, "chunk size 513 is not in 0..512"),
        ({"role": "boss"}, "'boss' is not a valid Role"),
        ({"strategy": "magic"}, "strategy 'magic' is unknown"),
    ],
    ids=["chunk", "role", "strategy"],
)
def test_impossible_plan_is_refused_and_the_old_one_stays(
    plan: dict[str, Any], error: str, pair: tuple[Engine, Engine]
) -> None:
    engine = pair[0]
    engine.configure(128)
    answer = engine.configure(**({"role": "P-heavy", "chunk_size_tokens": 64} | plan))
    assert (answer.generation, answer.role, answer.chunk_size_tokens) == (engine.generation - 1, "D-heavy", 128)
    assert error in answer.error


def test_older_plan_changes_nothing(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(128)
    answer = engine.configure(64, generation=engine.generation - 1)
    engine.generation -= 1
    assert (answer.generation, answer.chunk_size_tokens, answer.error) == (engine.generation, 128, "")


def test_decodes_are_never_cut_and_prefills_still_get_on(pair: tuple[Engine, Engine]) -> None:
    """Eight decodes fill a chunk of 8; a prompt beside them gets its minimum, and every decode its token."""
    engine = pair[0]
    parts = [engine.submit(make_prompt(20, salt=index), max_tokens=900) for index in range(8)]
    wait([engine], lambda: all(part.tokens for part in parts))
    engine.configure(8)
    engine.reports.clear()
    late = engine.submit(make_prompt(100), max_tokens=2)
    wait([engine], lambda: late.is_over)
    assert {shape.num_decodes for shape in iterations(engine)} <= {8, 9}
    assert not any(part.is_over for part in parts)
    engine.abort(*parts)


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_chunk_size_zero_returns_unstarted_prompts_and_lets_started_ones_finish(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(kind)[0]
    expected = run_alone(engine, make_prompt(800), max_tokens=10)
    engine.reports.clear()
    engine.configure(32)
    started = engine.submit(make_prompt(800), max_tokens=10)
    waiting = [engine.submit(make_prompt(100, salt=index)) for index in range(3)]
    wait([engine], lambda: bool(iterations(engine)))
    engine.configure(0)
    wait([engine], lambda: all(part.is_returned for part in waiting))
    assert not started.is_over
    late = engine.submit(make_prompt(100, salt=9))
    wait([engine], lambda: late.is_returned)
    wait([engine], lambda: started.is_over)
    assert started.tokens == expected.tokens
    assert not any(part.tokens for part in [*waiting, late])


def test_unstarted_prompt_is_returned_by_an_idle_engine(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(0)
    part = engine.submit(make_prompt(100))
    wait([engine], lambda: part.is_returned)
    assert engine.load().queued_requests == 0


def test_drain_returns_prompts_and_proposes_every_decode(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    parts = [engine.submit(make_prompt(40, salt=index), max_tokens=900) for index in range(3)]
    wait([engine], lambda: all(part.tokens for part in parts))
    engine.configure(128, is_draining=True, strategy="TaiChi")
    proposed: set[str] = set()

    def is_each_proposed() -> bool:
        proposed.update(
            move.request_id for report in engine.reports for move in report.proposals if move.cause == "drain"
        )
        return proposed == {part.request_id for part in parts}

    wait([engine], is_each_proposed)
    late = engine.submit(make_prompt(100))
    wait([engine], lambda: late.is_returned)
    engine.abort(*parts)


@pytest.mark.parametrize("chunk_size_tokens", [0, 64])
def test_preempted_decodes_all_end_at_any_chunk_size(chunk_size_tokens: int, small_pair: tuple[Engine, Engine]) -> None:
    """Four decodes outgrow 39 blocks. At chunk size 0 two of them made no progress before recompute always ran."""
    engine = small_pair[0]
    prompts = [make_prompt(6 * BLOCK_SIZE, salt=index) for index in range(4)]
    expected = [run_alone(engine, prompt, max_tokens=200).tokens for prompt in prompts]
    before = engine.load().num_preemptions
    parts = [engine.submit(prompt, max_tokens=200) for prompt in prompts]
    wait([engine], lambda: all(part.tokens for part in parts))
    engine.configure(chunk_size_tokens)
    wait([engine], lambda: all(part.is_over for part in parts))
    assert [part.tokens for part in parts] == expected
    assert engine.load().num_preemptions > before


def test_prompts_go_in_the_order_in_which_they_arrived_at_the_router(pair: tuple[Engine, Engine]) -> None:
    """However long they have waited for the scheduler, and in whichever order they came to it."""
    engine = pair[0]
    engine.configure(64)
    now_s = time.monotonic()
    ages_s = [10.0, 7.0, 9.0, 8.0]  # the first is under way when the others come
    parts = [
        engine.submit(
            make_prompt(600, salt=index), max_tokens=1, extras=core_messages.RequestExtras(arrival_s=now_s - age_s)
        )
        for index, age_s in enumerate(ages_s)
    ]
    ends: list[int] = []

    def note_ends() -> bool:
        ends.extend(index for index, part in enumerate(parts) if part.is_over and index not in ends)
        return len(ends) == len(parts)

    wait([engine], note_ends)
    assert ends == [0, 2, 3, 1]


def test_oldest_request_is_never_the_victim(small_pair: tuple[Engine, Engine]) -> None:
    engine = small_pair[0]
    prompts = [make_prompt(8 * BLOCK_SIZE, salt=index) for index in range(4)]
    parts = []
    for index, prompt in enumerate(prompts):
        extras = core_messages.RequestExtras(arrival_s=time.monotonic() - 10.0 + index)
        parts.append(engine.submit(prompt, max_tokens=150, extras=extras))
    ends: list[str] = []

    def note_ends() -> bool:
        ends.extend(part.request_id for part in parts if part.is_over and part.request_id not in ends)
        return len(ends) == len(parts)

    wait([engine], note_ends)
    assert ends[0] == parts[0].request_id


def test_moved_in_decode_starts_ahead_of_local_prefills(pair: tuple[Engine, Engine]) -> None:
    """Stock vLLM lets it wait behind them: 1757 ms instead of 85."""
    source, target = pair
    prompt = make_prompt(200)
    part = source.submit(prompt, max_tokens=400)
    wait([source], lambda: bool(part.tokens))
    target.configure(64)
    prefills = [target.submit(make_prompt(1900, salt=index), max_tokens=1) for index in range(3)]
    wait([target], lambda: len(iterations(target)) >= 2)
    moved = move(source, target, part, [], prompt, max_tokens=400)
    wait(pair, lambda: bool(moved.tokens))
    assert not any(prefill.is_over for prefill in prefills[1:])
    target.abort(moved, *prefills)


def test_recovery_goes_ahead_of_prompts_that_wait(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(64)
    prompts = [engine.submit(make_prompt(1000, salt=index), max_tokens=1) for index in range(4)]
    wait([engine], lambda: bool(iterations(engine)))
    recovered = engine.recover(make_prompt(300), [5, 6, 7], max_tokens=5)
    wait([engine], lambda: bool(recovered.tokens))
    assert sum(prompt.is_over for prompt in prompts) <= 1
    engine.abort(recovered, *prompts)


def test_priority_goes_first_among_prompts(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(64)
    first = engine.submit(make_prompt(1500), max_tokens=1)
    wait([engine], lambda: bool(iterations(engine)))
    low = engine.submit(make_prompt(400, salt=1), max_tokens=1)
    high = engine.submit(make_prompt(400, salt=2), max_tokens=1, priority=1)
    wait([engine], lambda: high.is_over)
    assert not low.is_over
    wait([engine], lambda: low.is_over and first.is_over)


def test_report_sums_what_waits_and_runs(pair: tuple[Engine, Engine]) -> None:
    engine = pair[0]
    engine.configure(32)
    extras = core_messages.RequestExtras(stream_number=7, submit_number=41)
    running = engine.submit(make_prompt(320), max_tokens=500, extras=extras)
    wait([engine], lambda: bool(running.tokens))
    engine.submit(
        make_prompt(320, salt=1), max_tokens=1, extras=core_messages.RequestExtras(stream_number=7, submit_number=42)
    )
    wait([engine], lambda: any(report.last_submit_numbers == {7: 42} for report in engine.reports))
    report = next(report for report in engine.reports if report.last_submit_numbers == {7: 42})
    assert engine.reports[0].last_submit_numbers == {7: 41}
    assert report.load.queued_requests == 1
    assert 0 < report.load.queued_prefill_tokens <= 320
    remaining, context = report.load.queued_prefill_tokens, 320 - report.load.queued_prefill_tokens
    assert report.load.queued_attention_work == pytest.approx(remaining * (context + remaining / 2))
    assert report.load.running_decodes == 1
    assert report.load.decode_context_tokens == pytest.approx(320 + len(running.tokens), abs=60)
    assert report.load.kv_blocks_total > 1000
    assert report.iteration is not None
    assert 0 < report.iteration.duration_s < 5
    engine.abort(*engine.parts.values())
    wait([engine], lambda: engine.load().queued_prefill_tokens == 0)
