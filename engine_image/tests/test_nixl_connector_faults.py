"""Engines that die, and handed-off blocks without a reader."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from engine_harness import BLOCK_SIZE, make_prompt, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_harness import Engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def short_lived(start_engine: Callable[..., Engine]) -> Engine:
    """An engine whose leases end after two seconds."""
    return start_engine("short", lease_s=2)


def start_and_hand_off(engine: Engine, prompt: list[int]) -> object:
    part = engine.submit(prompt, max_tokens=400)
    wait([engine], lambda: bool(part.tokens))
    assert engine.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([engine], lambda: part.is_over)
    return part


def test_lease_ends_in_time_whatever_the_reader_does(short_lived: Engine, pair: tuple[Engine, Engine]) -> None:
    """A target without room keeps the request in its queue; stock heartbeats would extend the lease meanwhile."""
    target = pair[1]
    part = start_and_hand_off(short_lived, make_prompt(4 * BLOCK_SIZE))
    began_s = time.monotonic()
    target.configure(0)
    assert target.grant("all", 1200 * BLOCK_SIZE, ttl_s=1.0).is_granted
    wait([short_lived], lambda: short_lived.load().kv_blocks_pinned == 0)
    assert time.monotonic() - began_s > 1.0
    assert short_lived.load().kv_blocks_used == 0
    assert part is not None


def test_source_that_dies_before_the_pull_costs_a_recompute_and_no_token(
    short_lived: Engine, pair: tuple[Engine, Engine]
) -> None:
    target = pair[1]
    prompt = make_prompt(6 * BLOCK_SIZE)
    seeded = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    expected = run_alone(target, prompt, **seeded)
    # They meet first, so that the death is seen by the transport and not by the handshake.
    first = start_and_hand_off(short_lived, make_prompt(40))
    met = target.resume(first, first.tokens, make_prompt(40), max_tokens=60)
    wait([short_lived, target], lambda: met.is_over)
    part = short_lived.submit(prompt, **seeded)
    wait([short_lived], lambda: bool(part.tokens))
    assert short_lived.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([short_lived], lambda: part.is_over)
    os.kill(short_lived.pid, signal.SIGKILL)
    other = target.submit(make_prompt(50), max_tokens=100)
    moved = target.resume(part, part.tokens, prompt, **seeded)
    wait([target], lambda: moved.is_over and other.is_over, 40)
    assert part.tokens + moved.tokens == expected.tokens
    assert target.load().num_recomputed_pulls > 0
