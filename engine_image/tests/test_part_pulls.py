"""KV that arrives in parts while its request goes on: exact tokens, short tails, no block lost whatever fails."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import BLOCK_SIZE, Part, make_prompt, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine

LONG = 600
PROMPT = make_prompt(6 * BLOCK_SIZE + 5)
_keys = itertools.count()


def start(engine: Engine, prompt: list[int], num_tokens: int = 2, **sampling: Any) -> Part:
    part = engine.submit(prompt, **({"max_tokens": 200} | sampling))
    wait([engine], lambda: len(part.tokens) >= num_tokens)
    return part


def offer(source: Engine, part: Part, first_token: int = 0) -> core_messages.OfferAnswer:
    answer: core_messages.OfferAnswer = source.command(
        core_messages.OfferCommand(key=f"offer-{next(_keys)}", request_id=part.request_id, first_token=first_token)
    )
    return answer


def pull(target: Engine, key: str, tokens: list[int], params: str) -> None:
    target.command(core_messages.PullPartCommand(key=key, token_ids=tokens, transfer_params=params))


def find_answer(target: Engine, key: str) -> core_messages.PulledPart | None:
    answers = [part for report in target.reports for part in report.pulled_parts if part.key == key]
    return answers[-1] if answers else None


def copy(source: Engine, target: Engine, part: Part, prompt: list[int]) -> tuple[str, core_messages.PulledPart]:
    """Grants, offers and pulls; the request runs on."""
    key = f"grant-{next(_keys)}"
    assert target.grant(key, len(prompt) + len(part.tokens) + 2 * BLOCK_SIZE).is_granted
    offered = offer(source, part)
    assert not offered.reason
    pull(target, key, [*prompt, *part.tokens][: offered.num_tokens], offered.transfer_params)
    wait([source, target], lambda: find_answer(target, key) is not None)
    answer = find_answer(target, key)
    assert answer is not None
    source.command(core_messages.ReleaseOfferCommand(key=offered.key))
    return key, answer


def hand_off(source: Engine, part: Part) -> None:
    assert source.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([source], lambda: part.is_over)
    assert part.handed_off is not None


def is_idle(*engines: Engine) -> bool:
    return all(engine.is_idle() for engine in engines)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}])
@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_a_request_goes_on_from_parts_with_the_same_tokens(
    kind: str, sampling: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    source, target = request.getfixturevalue(kind)
    alone = run_alone(source, PROMPT, max_tokens=60, **sampling)
    part = start(source, PROMPT, max_tokens=60, **sampling)
    key, answer = copy(source, target, part, PROMPT)
    assert (answer.num_tokens, answer.reason) == (6 * BLOCK_SIZE, "")
    before = target.load()
    hand_off(source, part)
    rest = target.resume(part, part.tokens, PROMPT, grant_key=key, max_tokens=60, **sampling)
    wait([source, target], lambda: rest.is_over)
    assert part.tokens + rest.tokens == alone.tokens
    after = target.load()
    assert after.num_moved_in == before.num_moved_in + 1
    assert after.num_recomputed_pulls == before.num_recomputed_pulls
    wait([source, target], lambda: is_idle(source, target))


def test_what_follows_a_copy_joins_with_the_next_iteration(async_pair: tuple[Engine, Engine]) -> None:
    source, target = async_pair
    part = start(source, PROMPT)
    key, _ = copy(source, target, part, PROMPT)
    hand_off(source, part)
    target.reports.clear()
    rest = target.resume(part, part.tokens, PROMPT, grant_key=key, max_tokens=200)
    wait([target], lambda: rest.tokens)
    first = next(report.iteration for report in target.reports if report.iteration is not None)
    # The first thing that it computes is the tail, and nothing waits for a pull before it.
    assert first.prefill_tokens == len(PROMPT) + len(part.tokens) - 6 * BLOCK_SIZE
    target.abort(rest)
    wait([source, target], lambda: is_idle(source, target))


def test_a_later_part_brings_what_was_decoded_meanwhile(pair: tuple[Engine, Engine]) -> None:
    source, target = pair
    alone = run_alone(source, PROMPT, max_tokens=300)
    part = start(source, PROMPT, max_tokens=300)
    key, _ = copy(source, target, part, PROMPT)
    wait([source], lambda: len(part.tokens) > 2 * BLOCK_SIZE)
    tokens = [*PROMPT, *part.tokens]
    later = offer(source, part, first_token=6 * BLOCK_SIZE)
    pull(target, key, tokens[6 * BLOCK_SIZE : later.num_tokens], later.transfer_params)
    wait([source, target], lambda: find_answer(target, key).num_tokens == later.num_tokens)  # type: ignore[union-attr]
    source.command(core_messages.ReleaseOfferCommand(key=later.key))
    assert later.num_tokens >= 8 * BLOCK_SIZE
    hand_off(source, part)
    rest = target.resume(part, part.tokens, PROMPT, grant_key=key, max_tokens=300)
    wait([source, target], lambda: rest.is_over)
    assert part.tokens + rest.tokens == alone.tokens
    wait([source, target], lambda: is_idle(source, target))


def test_blocks_that_the_target_has_are_not_read_again(pair: tuple[Engine, Engine]) -> None:
    source, target = pair
    run = target.submit(PROMPT, max_tokens=1)
    wait([target], lambda: run.is_over)
    part = start(source, PROMPT)
    key, answer = copy(source, target, part, PROMPT)
    assert answer.num_tokens == 6 * BLOCK_SIZE
    target.command(core_messages.ReleaseGrantCommand(key=key))
    source.abort(part)
    wait([source, target], lambda: is_idle(source, target))


ENDS = ["release", "lapse", "abort the request"]


@pytest.mark.parametrize("end", ENDS)
def test_a_copy_that_is_given_up_leaves_no_block_behind(pair: tuple[Engine, Engine], end: str) -> None:
    source, target = pair
    part = start(source, PROMPT)
    key = f"grant-{next(_keys)}"
    assert target.grant(key, len(PROMPT) + 40, ttl_s=0.3).is_granted
    offered = offer(source, part)
    if end == "abort the request":
        source.abort(part)
    pull(target, key, PROMPT[: offered.num_tokens], offered.transfer_params)
    if end == "release":
        target.command(core_messages.ReleaseGrantCommand(key=key))
    if end != "abort the request":
        source.abort(part)
    # Whatever has become of the grant, the source hears when nobody reads any more.
    wait([source, target], lambda: find_answer(target, key) is not None)
    source.command(core_messages.ReleaseOfferCommand(key=offered.key))
    wait([source, target], lambda: is_idle(source, target))


def test_an_offer_outlives_its_request(pair: tuple[Engine, Engine]) -> None:
    source, target = pair
    part = start(source, PROMPT)
    offered = offer(source, part)
    source.abort(part)
    wait([source], lambda: source.load().running_decodes == 0)
    assert source.load().kv_blocks_used == 6
    key = f"grant-{next(_keys)}"
    assert target.grant(key, len(PROMPT) + 8).is_granted
    pull(target, key, PROMPT[: offered.num_tokens], offered.transfer_params)
    wait([source, target], lambda: find_answer(target, key) is not None)
    source.command(core_messages.ReleaseOfferCommand(key=offered.key))
    assert source.is_idle()
    target.command(core_messages.ReleaseGrantCommand(key=key))
    assert target.is_idle()


def test_an_offer_that_nobody_heard_of_ends_at_once(pair: tuple[Engine, Engine]) -> None:
    source = pair[0]
    part = start(source, PROMPT)
    offered = offer(source, part)
    source.abort(part)
    wait([source], lambda: source.load().running_decodes == 0)
    for _ in range(2):
        source.command(core_messages.ReleaseOfferCommand(key=offered.key))
    assert source.is_idle()


def test_offers_say_why_there_are_none(pair: tuple[Engine, Engine]) -> None:
    source = pair[0]
    assert offer(source, Part("nobody")).reason == "unknown"
    part = start(source, make_prompt(8), max_tokens=100)
    assert offer(source, part).reason == "none"
    assert offer(source, part, first_token=10 * BLOCK_SIZE).reason == "none"
    source.abort(part)
    wait([source], source.is_idle)


def break_handle(params: str, change: str) -> str:
    handle = json.loads(params)
    if change == "too few blocks":
        handle["remote_block_ids"][0].pop()
    elif change == "gap":
        handle["sluice_first_token"] = 2 * BLOCK_SIZE
        handle["remote_block_ids"][0] = handle["remote_block_ids"][0][2:]
    return "" if change == "nothing" else json.dumps(handle)


@pytest.mark.parametrize(
    ("change", "reason"), [("too few blocks", "handle"), ("nothing", "handle"), ("gap", "gap"), ("lapsed", "lapsed")]
)
def test_a_part_that_cannot_be_pulled_is_refused(pair: tuple[Engine, Engine], change: str, reason: str) -> None:
    source, target = pair
    part = start(source, PROMPT)
    key = f"grant-{next(_keys)}"
    if change != "lapsed":
        assert target.grant(key, len(PROMPT) + 8).is_granted
    offered = offer(source, part)
    pull(target, key, PROMPT[: offered.num_tokens], break_handle(offered.transfer_params, change))
    wait([source, target], lambda: find_answer(target, key) is not None)
    answer = find_answer(target, key)
    assert answer is not None
    assert (answer.num_tokens, answer.reason) == (0, reason)
    target.command(core_messages.ReleaseGrantCommand(key=key))
    source.command(core_messages.ReleaseOfferCommand(key=offered.key))
    source.abort(part)
    wait([source, target], lambda: is_idle(source, target))
