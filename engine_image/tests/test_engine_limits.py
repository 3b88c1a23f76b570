"""How the times of an engine fit together."""

from __future__ import annotations

from sluice_core.sim.moves import cut_hand_offs
from sluice_core.strategies.disaggregated import GRANT_WAIT_MILLISECONDS
from sluice_engine.kv_transfer import grants, kv_transfer_timeouts


def test_simulated_engines_keep_grants_for_as_long_and_pulls_are_started_within_that_time() -> None:
    assert cut_hand_offs.GRANT_TTL_S == grants.GRANT_TTL_S >= kv_transfer_timeouts.PULL_START_S


def test_handed_off_kv_outlives_the_longest_wait_for_a_decode_engine_and_the_start_of_its_pull() -> None:
    longest_wait_s = GRANT_WAIT_MILLISECONDS.read(str(GRANT_WAIT_MILLISECONDS.high))
    assert longest_wait_s + kv_transfer_timeouts.PULL_START_S < kv_transfer_timeouts.KV_LEASE_S
