"""A request that moves while it decodes ends with the very tokens of one that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import Engine, Part, move, wait

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.engine


def make_prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [(index * 37 + num_tokens * 11 + salt * 101) % 2000 + 3 for index in range(num_tokens)]


def run_alone(engine: Engine, prompt: Sequence[int], **sampling: Any) -> Part:
    part = engine.submit(prompt, **sampling)
    wait([engine], lambda: part.is_over)
    engine.client.reset_prefix_cache()
    return part


def run_moving(engines: Sequence[Engine], cuts: Sequence[int], prompt: Sequence[int], **sampling: Any) -> Part:
    """Runs a request that moves to the next engine when it has as many tokens as the next cut says."""
    tokens: list[int] = []
    logprobs: list[float] = []
    part = engines[0].submit(prompt, **sampling)
    for hop, cut in enumerate(cuts):
        source, target = engines[hop % 2], engines[(hop + 1) % 2]
        wait(engines, lambda: part.is_over or len(tokens) + len(part.tokens) >= cut)  # noqa: B023
        if part.is_over:
            break
        following = move(source, target, part, tokens, prompt, **sampling)
        tokens += part.tokens
        logprobs += part.logprobs
        part = following
    wait(engines, lambda: part.is_over)
    return Part(part.request_id, tokens + part.tokens, logprobs + part.logprobs, part.finish_reason, part.stop_reason)


def test_decode_moves_with_a_grant_and_ends_with_the_same_tokens(pair: tuple[Engine, Engine]) -> None:
    prompt = make_prompt(150)
    expected = run_alone(pair[0], prompt, logprobs=0)
    moved = run_moving(pair, [10], prompt, logprobs=0)
    assert moved.tokens == expected.tokens
    assert moved.logprobs == expected.logprobs
    assert pair[1].load().num_moved_in == 1
