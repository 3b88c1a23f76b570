"""The times and limits of an engine: what routers, clients and other engines rely on, and how they fit together."""

from __future__ import annotations

import pytest

from sluice_core.sim.moves import cut_hand_offs
from sluice_core.strategies.disaggregated import GRANT_WAIT_MILLISECONDS
from sluice_engine import child_processes, resume_timeouts
from sluice_engine.kv_transfer import grants, kv_transfer_timeouts, rdma_preflight, transport_in_use
from sluice_engine.scheduling import expected_arrivals
from sluice_engine.server import attach_stream, engine_server, grpc_server, load_reporter, pending_prefixes, usage_relay
from sluice_engine.server.resumption import resumable_requests
from sluice_engine.startup import warm_up

SECONDS = {
    # Of KV and room for it.
    "how long room is kept for a request that is on its way": (grants.GRANT_TTL_S, 2.0),
    "how long handed-off KV waits for its reader": (kv_transfer_timeouts.KV_LEASE_S, 30),
    "how long the read of a part may take": (kv_transfer_timeouts.LONGEST_READ_S, 15.0),
    "how long a pull waits for room": (kv_transfer_timeouts.PULL_START_S, 2.0),
    "how long a request is expected after its KV": (expected_arrivals.EXPECTED_S, 0.5),
    # Of streams.
    "how long an engine is silent at most": (load_reporter.IDLE_REPORT_S, 0.5),
    "how far apart load reports are at least": (load_reporter.LOAD_REPORT_S, 0.05),
    "how exact an engine's clock is": (engine_server.TICK_S, 0.1),
    "how long what owners used is kept": (usage_relay.KEPT_S, 61),
    "how long requests of a lost stream go on": (resume_timeouts.LEASE_S, 10.0),
    # Of starts and ends.
    "how long the first requests may take": (warm_up.TIMEOUT_S, 120.0),
    "how long killed processes may take to be gone": (child_processes.KILL_TIMEOUT_S, 10.0),
    "how often UCX's log is written out": (transport_in_use.FLUSH_S, 1.0),
}
NUMBERS = {
    "messages that wait for a router that does not read": (attach_stream.MAX_WAITING_MESSAGES, 4096),
    "cached blocks of one message": (pending_prefixes.MAX_HASHES, 65_536),
    "bytes of a message": (grpc_server.MAX_MESSAGE_BYTES, 64 << 20),
    "bytes of a router's state of an answer": (resumable_requests.MAX_STATE_BYTES, 16 << 10),
    "bytes of ended requests": (resumable_requests.MAX_ENDED_BYTES, 64 << 20),
    "claims that are remembered": (resumable_requests.MAX_CLAIMS, 16_384),
    "bytes that RDMA has to lock": (rdma_preflight.LEAST_MEMLOCK_BYTES, 1 << 30),
}


@pytest.mark.parametrize("name", [*SECONDS, *NUMBERS])
def test_a_limit_is_what_others_rely_on(name: str) -> None:
    limit, expected = (SECONDS | NUMBERS)[name]
    assert limit == expected


def test_simulated_engines_keep_grants_for_as_long_and_pulls_are_started_within_that_time() -> None:
    assert cut_hand_offs.GRANT_TTL_S == grants.GRANT_TTL_S >= kv_transfer_timeouts.PULL_START_S


def test_handed_off_kv_outlives_the_longest_wait_for_a_decode_engine_and_the_start_of_its_pull() -> None:
    longest_wait_s = GRANT_WAIT_MILLISECONDS.read(str(GRANT_WAIT_MILLISECONDS.high))
    assert longest_wait_s + kv_transfer_timeouts.PULL_START_S < kv_transfer_timeouts.KV_LEASE_S
