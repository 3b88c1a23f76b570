"""Engines that die, and handed-off blocks without a reader."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from engine_harness import BLOCK_SIZE, make_prompt, run_alone, wait

from sluice_engine import core_messages
from sluice_engine.kv_transfer import incoming_pulls

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_harness import Engine, Part

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def short_lived(start_engine: Callable[..., Engine]) -> Engine:
    """An engine whose leases end after two seconds."""
    return start_engine("short", lease_s=2)


@pytest.fixture(scope="module")
def patient(start_engine: Callable[..., Engine]) -> Engine:
    """An engine that never gives a hand-off up which it has no room for."""
    # Stock vLLM's heartbeats come several times in the length of its own lease.
    return start_engine("patient", lease_s=2, replaced={f"{incoming_pulls.__name__}.PULL_START_S": 3600.0})


def start_and_hand_off(engine: Engine, prompt: list[int]) -> Part:
    part = engine.submit(prompt, max_tokens=400)
    wait([engine], lambda: bool(part.tokens))
    assert engine.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([engine], lambda: part.is_over)
    return part


def test_lease_ends_in_time_whatever_the_reader_does(short_lived: Engine, patient: Engine) -> None:
    """A target without room keeps the request in its queue; stock heartbeats would extend the lease meanwhile."""
    free = patient.load().kv_blocks_total - patient.load().kv_blocks_used
    assert patient.grant("all", free * BLOCK_SIZE, ttl_s=3600.0).is_granted
    prompt = make_prompt(4 * BLOCK_SIZE)
    part = start_and_hand_off(short_lived, prompt)
    began_s = time.monotonic()
    reader = patient.resume(part, part.tokens, prompt, max_tokens=60)
    assert short_lived.load().kv_blocks_pinned >= 4
    wait([short_lived, patient], lambda: short_lived.load().kv_blocks_pinned == 0)
    assert time.monotonic() - began_s > 1.0
    assert short_lived.load().kv_blocks_used == 0
    # The reader waits all the same.
    assert patient.load().num_recomputed_pulls == 0
    assert not reader.tokens
    assert not reader.is_over
    patient.abort(reader)
    patient.command(core_messages.ReleaseGrantCommand(key="all"))
    wait([patient], patient.is_idle)


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
    offered = short_lived.command(core_messages.OfferCommand(key="offer", request_id=part.request_id))
    assert short_lived.command(core_messages.HandOffCommand(request_id=part.request_id)).is_accepted
    wait([short_lived], lambda: part.is_over)
    os.kill(short_lived.pid, signal.SIGKILL)
    assert target.grant("copy", 8 * BLOCK_SIZE, ttl_s=60.0).is_granted
    tokens = [*prompt, *part.tokens][: offered.num_tokens]
    target.command(core_messages.PullPartCommand(key="copy", token_ids=tokens, transfer_params=offered.transfer_params))
    other = target.submit(make_prompt(50), max_tokens=100)
    moved = target.resume(part, part.tokens, prompt, **seeded)
    wait([target], lambda: moved.is_over and other.is_over, 40)
    assert part.tokens + moved.tokens == expected.tokens
    assert target.load().num_recomputed_pulls > 0
    # A copy that was under way has failed too. Its blocks are empty again, and the grant's.
    wait([target], lambda: any(report.pulled_parts for report in target.reports))
    (answer,) = [part for report in target.reports for part in report.pulled_parts]
    assert (answer.key, answer.num_tokens, answer.reason) == ("copy", 0, "failed")
    assert target.load().kv_blocks_granted == 8
    target.command(core_messages.ReleaseGrantCommand(key="copy"))
    assert target.is_idle()
