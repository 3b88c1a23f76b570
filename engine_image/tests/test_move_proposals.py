"""Proposed moves follow the objectives and counts that requests bring along; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice_core.kv_blocks import KvBlocks
from sluice_core.records import MoveCause, Role
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_engine.core_messages import ConfigureCommand, RequestExtras
from sluice_engine.scheduling.move_proposals import MoveProposer
from sluice_engine.scheduling.received_plan import ReceivedPlan

NOW_S = 100.0


def make_proposer(role: str) -> tuple[ReceivedPlan, MoveProposer]:
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=64)
    plan = ReceivedPlan(decodes, max_batch_tokens=512)
    configure(plan, 1, role=role)
    return plan, MoveProposer(decodes, plan)


def configure(plan: ReceivedPlan, generation: int, **changes: Any) -> None:
    fields: dict[str, Any] = {"role": "P-heavy", "chunk_size_tokens": 256, "strategy": "TaiChi"}
    fields |= {"chunk_sizes_tokens": [256, 512], **changes}
    assert not plan.configure(ConfigureCommand(generation=generation, **fields)).error


def track(name: str, output_tokens: int, *, first_token_s: float | None = NOW_S, **extras: Any) -> Any:
    """A request of 100 prompt tokens, one of whose output tokens came here."""
    defaults = {"output_token_ids": [1] * (output_tokens - 1), "tpot_slo_s": 0.05}
    return SimpleNamespace(
        request=SimpleNamespace(request_id=name, num_prompt_tokens=100, num_output_tokens=output_tokens),
        extras=RequestExtras(**{**defaults, **extras}),
        first_token_s=first_token_s,
        is_moved_in=False,
    )


def propose(proposer: MoveProposer, used: int) -> list[tuple[str, str]]:
    blocks = KvBlocks(total=1000, used=used)
    return [(str(proposal.request_id), proposal.cause) for proposal in proposer.propose(NOW_S, blocks)]


def test_a_decode_flows_back_by_the_objective_and_the_first_token_that_came_with_it() -> None:
    _, proposer = make_proposer("P-heavy")
    proposer.join(track("slow", 20, first_token_s=NOW_S - 2.0), NOW_S)
    proposer.join(track("quick", 20, first_token_s=NOW_S - 0.2), NOW_S)
    proposer.join(track("in no hurry", 20, first_token_s=NOW_S - 2.0, tpot_slo_s=5.0), NOW_S)
    proposer.join(track("without an objective", 20, first_token_s=NOW_S - 2.0, tpot_slo_s=0.0), NOW_S)
    assert [name for name, cause in propose(proposer, 0) if cause == "backflow"] == ["slow"]


@pytest.mark.parametrize(
    ("since_reset", "first"), [(499, "long"), (3, "short")], ids=["never moved back", "moved back three tokens ago"]
)
def test_the_longest_output_since_its_last_backflow_is_degraded_first(since_reset: int, first: str) -> None:
    _, proposer = make_proposer("D-heavy")
    proposer.join(track("long", 500, output_tokens_since_reset=since_reset), NOW_S)
    proposer.join(track("short", 50, output_tokens_since_reset=49), NOW_S)
    assert propose(proposer, 955)[0] == (first, "degrade")


def test_a_draining_engine_sends_its_decodes_away() -> None:
    plan, proposer = make_proposer("D-heavy")
    proposer.join(track("a", 20), NOW_S)
    proposer.join(track("gone", 20), NOW_S)
    proposer.leave("gone")
    proposer.leave("never here")
    assert propose(proposer, 0) == []
    configure(plan, 2, role="D-heavy", is_draining=True)
    assert propose(proposer, 0) == [("a", "drain")]


def test_the_plan_sets_the_watermark() -> None:
    plan, proposer = make_proposer("D-heavy")
    configure(plan, 2, role="D-heavy", parameters={"watermark_percent": "50"})
    assert plan.policy.share_for(Role.PREFILL_HEAVY, MoveCause.DEGRADE) == 0.5
    proposer.join(track("a", 160), NOW_S)
    # 260 tokens are 17 blocks of 16: more than half of all are in use.
    (proposal,) = proposer.propose(NOW_S, KvBlocks(total=1000, used=501))
    assert (proposal.request_id, proposal.cause) == ("a", "degrade")
    assert (proposal.num_output_tokens, proposal.num_blocks) == (160, 17)


@pytest.mark.parametrize(("factor", "names"), [("70", ["a"]), ("96", [])])
def test_a_decode_flows_back_at_the_planned_share_of_its_objective(factor: str, names: list[str]) -> None:
    plan, proposer = make_proposer("P-heavy")
    configure(plan, 2, parameters={"approaching_factor_percent": factor})
    # 40 ms per token, where 50 ms are allowed.
    proposer.join(track("a", 20, first_token_s=NOW_S - 19 * 0.04), NOW_S)
    assert [name for name, cause in propose(proposer, 0) if cause == "backflow"] == names


@pytest.mark.parametrize(("num_tokens", "names"), [("2", ["a"]), ("3", [])])
def test_a_decode_that_moved_in_stays_for_the_planned_number_of_tokens(num_tokens: str, names: list[str]) -> None:
    plan, proposer = make_proposer("D-heavy")
    configure(plan, 2, role="D-heavy", parameters={"min_tokens_between_moves": num_tokens})
    tracked = track("a", 160)
    tracked.is_moved_in = True
    proposer.join(tracked, NOW_S)
    for _ in range(2):
        proposer.advance({"a": 1})
    assert [name for name, _ in propose(proposer, 1000)] == names


def test_a_decode_that_sits_an_iteration_out_has_no_more_output() -> None:
    plan, proposer = make_proposer("D-heavy")
    configure(plan, 2, is_draining=True)
    for name in ("runs", "waits"):
        proposer.join(track(name, 160), NOW_S)
    proposer.advance({"runs": 1, "another": 1})
    proposer.advance({"runs": 1})
    proposals = proposer.propose(NOW_S, KvBlocks(total=100, used=50))
    assert {str(each.request_id): each.num_output_tokens for each in proposals} == {"runs": 162, "waits": 160}


def test_the_first_token_is_now_unless_it_came_before() -> None:
    _, proposer = make_proposer("P-heavy")
    fresh, resumed = track("fresh", 1, first_token_s=None), track("resumed", 20, first_token_s=NOW_S - 2.0)
    for tracked in (fresh, resumed):
        proposer.join(tracked, NOW_S)
    assert (fresh.first_token_s, resumed.first_token_s) == (NOW_S, NOW_S - 2.0)
