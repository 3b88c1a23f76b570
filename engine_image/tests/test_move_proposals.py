"""Proposed moves follow the objectives and counts that requests bring along; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sluice_core.kv import KvBlocks
from sluice_engine.core_messages import ConfigureCommand, RequestExtras
from sluice_engine.scheduling.move_proposals import MoveProposer

NOW_S = 100.0


def make_proposer(role: str) -> MoveProposer:
    proposer = MoveProposer(max_batch_tokens=512, block_size_tokens=16, max_num_seqs=64)
    plan = ConfigureCommand(
        generation=1, role=role, chunk_size_tokens=256, strategy="TaiChi", chunk_sizes_tokens=[256, 512]
    )
    assert not proposer.configure(plan).error
    return proposer


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
    proposer = make_proposer("P-heavy")
    proposer.join(track("slow", 20, first_token_s=NOW_S - 2.0), NOW_S)
    proposer.join(track("quick", 20, first_token_s=NOW_S - 0.2), NOW_S)
    proposer.join(track("in no hurry", 20, first_token_s=NOW_S - 2.0, tpot_slo_s=5.0), NOW_S)
    proposer.join(track("without an objective", 20, first_token_s=NOW_S - 2.0, tpot_slo_s=0.0), NOW_S)
    assert [name for name, cause in propose(proposer, 0) if cause == "backflow"] == ["slow"]


@pytest.mark.parametrize(
    ("since_reset", "first"), [(499, "long"), (3, "short")], ids=["never moved back", "moved back three tokens ago"]
)
def test_the_longest_output_since_its_last_backflow_is_degraded_first(since_reset: int, first: str) -> None:
    proposer = make_proposer("D-heavy")
    proposer.join(track("long", 500, output_tokens_since_reset=since_reset), NOW_S)
    proposer.join(track("short", 50, output_tokens_since_reset=49), NOW_S)
    assert propose(proposer, 955)[0] == (first, "degrade")
