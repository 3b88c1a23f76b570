"""Prompts whose first part one engine computes and another goes on with: the very tokens of one that is whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import BLOCK_SIZE, MAX_BATCH_TOKENS, make_prompt, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine, Part

pytestmark = pytest.mark.engine

# Around block and chunk boundaries, and the least and the most that a first part can have.
PROMPTS = (300, MAX_BATCH_TOKENS + 201)
CUTS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, 8 * BLOCK_SIZE - 1, 8 * BLOCK_SIZE, 8 * BLOCK_SIZE + 1, -1)
NUM_TOKENS = 12
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 1234}


def begin(engine: Engine, prompt: list[int]) -> Part:
    """Submits the first part of a prompt, as the serving process does."""
    return engine.submit(prompt, extras=core_messages.RequestExtras(is_first_part=True), max_tokens=1)


def go_on(engine: Engine, first: Part, prompt: list[int], key: str = "", **sampling: Any) -> Part:
    """Submits a prompt whose first part waits elsewhere."""
    assert first.handed_off is not None
    extras = core_messages.RequestExtras(transfer_params=first.handed_off.transfer_params, grant_key=key)
    return engine.submit(prompt, extras=extras, **({"max_tokens": NUM_TOKENS} | sampling))


def run_cut(pair: tuple[Engine, Engine], cut: int, prompt: list[int], key: str, **sampling: Any) -> Part:
    """Runs a prompt that is cut behind so many tokens, as a router would have it."""
    source, target = pair
    first = begin(source, prompt[:cut])
    wait(pair, lambda: first.is_over)
    assert first.handed_off is not None
    assert first.handed_off.num_tokens == len(prompt[:cut])
    assert target.grant(key, len(prompt) + 1, cause="split").is_granted
    second = go_on(target, first, prompt, key, **sampling)
    wait(pair, lambda: second.is_over)
    source.command(core_messages.ReleaseCommand(request_id=first.request_id))
    return second


def take_pulled(engine: Engine) -> list[core_messages.PulledPart]:
    """What an engine has said of KV that has come."""
    parts = [part for report in engine.reports for part in report.pulled_parts]
    engine.reports.clear()
    return parts


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
@pytest.mark.parametrize("num_prompt_tokens", PROMPTS)
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seed"])
def test_a_prompt_that_is_cut_anywhere_has_the_tokens_of_a_whole_one(
    kind: str, num_prompt_tokens: int, sampling: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    pair: tuple[Engine, Engine] = request.getfixturevalue(kind)
    prompt = make_prompt(num_prompt_tokens)
    expected = run_alone(pair[0], prompt, max_tokens=NUM_TOKENS, **sampling)
    before = pair[1].load()
    for cut in CUTS:
        for engine in pair:
            engine.client.reset_prefix_cache()
            engine.reports.clear()
        key = f"{kind}.{num_prompt_tokens}.{cut}"
        assert run_cut(pair, cut, prompt, key, **sampling).tokens == expected.tokens, cut
        num_brought = len(prompt[:cut])
        # The last token's KV is never brought: then it is a request that joins, and the router hears by its token.
        expected_parts = [core_messages.PulledPart(key=key, num_tokens=num_brought)] if cut != -1 else []
        assert take_pulled(pair[1]) == expected_parts
    wait(pair, lambda: all(engine.is_idle() for engine in pair))
    assert pair[1].load().num_recomputed_pulls == before.num_recomputed_pulls


def test_the_rest_of_a_prompt_keeps_to_the_chunk_size(pair: tuple[Engine, Engine]) -> None:
    prompt = make_prompt(700)
    expected = run_alone(pair[0], prompt, max_tokens=NUM_TOKENS)
    pair[1].configure(64)
    pair[1].reports.clear()
    assert run_cut(pair, 333, prompt, "chunked").tokens == expected.tokens
    shapes = [report.iteration for report in pair[1].reports if report.iteration is not None]
    assert sum(shape.prefill_tokens for shape in shapes) == 700 - 333
    assert max(shape.prefill_tokens for shape in shapes) <= 64


def test_a_first_part_is_proposed_when_it_begins_and_sends_its_kv_while_it_computes(
    pair: tuple[Engine, Engine],
) -> None:
    source, target = pair
    prompt = make_prompt(700)
    expected = run_alone(source, prompt, max_tokens=NUM_TOKENS)
    source.configure(64)
    source.reports.clear()
    first = begin(source, prompt[:600])
    proposed = lambda: [move for report in source.reports for move in report.proposals]  # noqa: E731
    wait(pair, proposed)
    assert [(move.request_id, move.cause) for move in proposed()] == [(first.request_id, "split")]
    assert target.grant("parts", len(prompt) + 1, cause="split").is_granted
    num_copied, num_parts = 0, 0
    while not first.is_over:
        offer = source.command(
            core_messages.OfferCommand(key=f"o{num_parts}", request_id=first.request_id, first_token=num_copied)
        )
        if offer.reason:
            source.poll(0.01)
            continue
        target.command(
            core_messages.PullPartCommand(
                key="parts", token_ids=prompt[num_copied : offer.num_tokens], transfer_params=offer.transfer_params
            )
        )
        answers: list[core_messages.PulledPart] = []
        wait(pair, lambda: answers.extend(take_pulled(target)) or answers)  # noqa: B023
        assert not answers[0].reason
        num_copied, num_parts = answers[0].num_tokens, num_parts + 1
        source.command(core_messages.ReleaseOfferCommand(key=f"o{num_parts - 1}"))
    assert num_parts >= 2
    second = go_on(target, first, prompt, "parts")
    wait(pair, lambda: second.is_over)
    assert second.tokens == expected.tokens
    source.command(core_messages.ReleaseCommand(request_id=first.request_id))
    wait(pair, lambda: all(engine.is_idle() for engine in pair))


def test_a_first_part_that_is_aborted_leaves_nothing_behind(pair: tuple[Engine, Engine]) -> None:
    source = pair[0]
    source.configure(32)
    first = begin(source, make_prompt(700)[:600])
    wait(pair, lambda: source.load().kv_blocks_used > 0)
    source.abort(first)
    wait(pair, source.is_idle)
    assert first.handed_off is None


def test_when_the_kv_of_a_first_part_is_gone_the_prompt_is_computed_here(pair: tuple[Engine, Engine]) -> None:
    source, target = pair
    prompt = make_prompt(300)
    expected = run_alone(source, prompt, max_tokens=NUM_TOKENS)
    first = begin(source, prompt[:200])
    wait(pair, lambda: first.is_over)
    assert first.handed_off is not None
    extras = core_messages.RequestExtras(transfer_params="{}", grant_key="bad.1")
    target.reports.clear()
    second = target.submit(prompt, extras=extras, max_tokens=NUM_TOKENS)
    wait(pair, lambda: second.is_over)
    assert second.tokens == expected.tokens
    assert [part.reason for part in take_pulled(target)] == ["handle"]
    source.command(core_messages.ReleaseCommand(request_id=first.request_id))
    wait(pair, lambda: all(engine.is_idle() for engine in pair))


def test_decodes_go_on_beside_a_prompt_that_waits_for_room(pair: tuple[Engine, Engine]) -> None:
    """A prompt whose KV has come holds blocks; with no room for prefills it stands in nobody's way."""
    source, target = pair
    prompt = make_prompt(400)
    expected = run_alone(source, prompt, max_tokens=NUM_TOKENS)
    beside = [run_alone(source, make_prompt(60 + index), max_tokens=40).tokens for index in range(3)]
    decodes = [target.submit(make_prompt(60 + index), max_tokens=40) for index in range(3)]
    wait(pair, lambda: all(part.tokens for part in decodes))
    target.configure(3)  # the decodes fill it
    first = begin(source, prompt[:200])
    wait(pair, lambda: first.is_over)
    assert target.grant("room", len(prompt) + 1, cause="split", ttl_s=20.0).is_granted
    second = go_on(target, first, prompt, "room")
    wait(pair, lambda: all(part.is_over for part in decodes))
    assert [part.tokens for part in decodes] == beside
    target.configure(256)
    end_s = time.monotonic() + 20.0
    wait(pair, lambda: second.is_over or time.monotonic() > end_s)
    assert second.tokens == expected.tokens
    source.command(core_messages.ReleaseCommand(request_id=first.request_id))
    wait(pair, lambda: all(engine.is_idle() for engine in pair))
