"""Where a decode moves to: targets of each cause of a move."""

from collections import Counter

import pytest
from decode_flow_harness import BLOCK, D, P, make_policy

from sluice_core.records import EngineId, MoveCause
from sluice_core.scheduling.decode_flow import (
    FlowRequest,
)
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable

# --- targets ---

SPEC = EngineConfig(block_size_tokens=BLOCK, kv_bytes_per_token=1000, max_num_seqs=10, max_batch_tokens=8192)


def make_table(*engines):
    """Make a table of (role, used blocks, other load fields); 100 blocks each."""
    table = EngineTable()
    for number, (role, used, fields) in enumerate(engines):
        engine_id = EngineId(f"e{number}")
        values = dict(fields)
        chunk = values.pop("chunk", 2048 if role is P else 256)
        is_draining = values.pop("is_draining", False)
        table.add(engine_id, SPEC, role=role, chunk_size_tokens=chunk)
        table.report(engine_id, EngineLoad(kv_blocks_total=100, kv_blocks_used=used, **values), 0.0)
        table.configure(engine_id, role=role, chunk_size_tokens=chunk, is_draining=is_draining)
    return table


def find_target(table, cause, *, source="e0", blocks=5, excluded=()):
    request = FlowRequest(
        cause=cause,
        source=EngineId(source),
        num_blocks=blocks,
        excluded=frozenset(map(EngineId, excluded)),
    )
    return make_policy().target(0.0, request, table)


DONE, _SPLIT, DEGRADE, BACKFLOW, DRAIN, MANUAL = MoveCause


@pytest.mark.parametrize(
    ("cause", "engines", "expected"),
    [
        (DONE, [(P, 0, {}), (D, 50, {}), (D, 40, {})], "e2"),
        (DONE, [(P, 0, {}), (D, 50, {}), (D, 40, {"kv_blocks_granted": 20})], "e1"),
        (DONE, [(P, 0, {}), (D, 95, {})], "e1"),
        (DONE, [(P, 0, {}), (D, 96, {})], None),
        (DONE, [(P, 0, {}), (D, 90, {"kv_blocks_granted": 6})], None),
        (DONE, [(P, 0, {}), (D, 0, {"running_decodes": 10})], None),
        (DONE, [(P, 0, {}), (D, 0, {"running_decodes": 9})], "e1"),
        (DONE, [(P, 0, {}), (D, 0, {"is_draining": True}), (P, 0, {})], None),
        (DONE, [(P, 0, {}), (D, 0, {"is_draining": True}), (D, 50, {})], "e2"),
        (DONE, [(P, 0, {}), (P, 0, {})], None),
        (DONE, [(D, 0, {}), (D, 0, {}), (P, 0, {})], None),
        (DONE, [(P, 0, {"chunk": 512}), (D, 0, {"chunk": 512})], None),
        (DONE, [(P, 0, {}), (D, 0, {"chunk": 0})], "e1"),
        (BACKFLOW, [(P, 0, {}), (D, 95, {}), (P, 0, {})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 30, {}), (P, 20, {}), (D, 0, {})], "e2"),
        (DEGRADE, [(D, 90, {}), (P, 85, {})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 86, {})], None),
        (DEGRADE, [(D, 90, {}), (P, 0, {"running_decodes": 8})], "e1"),
        (DEGRADE, [(D, 90, {}), (P, 0, {"running_decodes": 9})], None),
        (DEGRADE, [(D, 90, {"chunk": 64}), (P, 0, {"chunk": 64})], None),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 50, {}), (P, 0, {})], "e1"),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 96, {}), (P, 0, {})], "e2"),
        (DRAIN, [(P, 0, {"is_draining": True}), (D, 0, {}), (P, 80, {})], "e2"),
        (DRAIN, [(D, 0, {"is_draining": True, "chunk": 64}), (D, 0, {"chunk": 64})], "e1"),
        (DRAIN, [(D, 0, {"is_draining": True}), (D, 99, {}), (P, 90, {})], None),
        (MANUAL, [(D, 0, {}), (D, 50, {}), (P, 0, {})], "e1"),
    ],
    ids=[
        "first decode: least used D-heavy",
        "first decode: grants included",
        "first decode: physical room, not the watermark",
        "first decode: no room",
        "first decode: granted blocks are no room",
        "first decode: no seat",
        "first decode: last seat",
        "first decode: nobody but a draining engine",
        "first decode: not to a draining engine",
        "first decode: no D-heavy engine",
        "first decode: stays on D-heavy",
        "first decode: equal chunk sizes",
        "first decode: disaggregated",
        "backflow: D-heavy at the watermark",
        "degrade: least used P-heavy",
        "degrade: up to the watermark",
        "degrade: not beyond it",
        "degrade: seats up to the watermark",
        "degrade: seats not beyond it",
        "degrade: equal chunk sizes",
        "drain: same role first",
        "drain: any with room",
        "drain: P-heavy to P-heavy",
        "drain: though chunk sizes are equal",
        "drain: P-heavy is bounded by the watermark",
        "manual: as drain",
    ],
)
def test_targets(cause, engines, expected):
    assert find_target(make_table(*engines), cause) == expected


def test_moves_of_one_tick_spread():
    table = make_table((P, 0, {}), (D, 0, {}), (D, 0, {}))
    first = find_target(table, DONE)
    table.record_grant_request(first, 1, 5)
    assert {first, find_target(table, DONE)} == {"e1", "e2"}


def test_excluded_engines_are_no_targets():
    table = make_table((P, 0, {}), (D, 0, {}), (D, 50, {}))
    assert find_target(table, DONE, excluded=["e1"]) == "e2"


def test_equally_used_targets_are_picked_at_random():
    table, policy = make_table((P, 0, {}), (D, 0, {}), (D, 0, {})), make_policy()
    request = FlowRequest(cause=DONE, source=EngineId("e0"), num_blocks=1)
    counts = Counter(policy.target(0.0, request, table) for _ in range(200))
    assert min(counts["e1"], counts["e2"]) > 60


@pytest.mark.parametrize(("cause", "expected"), [(DRAIN, {"e0", "e1"}), (DONE, {"e1"}), (DEGRADE, {"e0"})])
def test_a_source_that_is_gone_still_finds_a_target(cause, expected):
    assert find_target(make_table((P, 0, {}), (D, 0, {})), cause, source="gone") in expected
