"""A plan is put in force or refused whole."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_core.scheduling.decode_set import DecodeSet
from sluice_engine.core_messages import ConfigureCommand
from sluice_engine.scheduling import received_plan
from sluice_engine.scheduling.received_plan import ReceivedPlan


def make_plan() -> ReceivedPlan:
    return ReceivedPlan(DecodeSet(block_size_tokens=16, max_num_seqs=64), max_batch_tokens=512)


def make_configured(role: str) -> ReceivedPlan:
    plan = make_plan()
    assert not configure(plan, 1, role=role)[3]
    return plan


def configure(plan: ReceivedPlan, generation: int, **changes: Any) -> tuple[int, str, int, str]:
    fields: dict[str, Any] = {
        "role": "P-heavy",
        "chunk_size_tokens": 256,
        "strategy": "TaiChi",
        "chunk_sizes_tokens": [256, 512],
    }
    fields |= changes
    answer = plan.configure(ConfigureCommand(generation=generation, **fields))
    return answer.generation, str(answer.role), answer.chunk_size_tokens, answer.error


def test_before_the_first_plan_the_largest_chunk_is_in_force() -> None:
    plan = make_plan()
    assert (plan.command.generation, plan.command.chunk_size_tokens, plan.last_chunk_size_tokens) == (0, 512, 512)
    assert plan.role == "D-heavy"


def test_a_plan_with_an_older_number_changes_nothing() -> None:
    plan = make_configured("D-heavy")
    assert configure(plan, 5, chunk_size_tokens=128) == (5, "P-heavy", 128, "")
    assert configure(plan, 4, role="D-heavy") == (5, "P-heavy", 128, "")
    # The same number again is in force: it may say the same, or what was corrected.
    assert configure(plan, 5, role="D-heavy") == (5, "D-heavy", 256, "")
    assert plan.role == "D-heavy"


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({"role": "D-heavy", "chunk_size_tokens": 64, "is_draining": True}, True),
        ({"strategy": "EcoServe"}, False),
        ({"parameters": {"watermark_percent": "80"}}, False),
    ],
)
def test_a_plan_of_the_same_strategy_keeps_the_policy_with_what_it_has_measured(
    changes: dict[str, Any], *, is_kept: bool
) -> None:
    plan = make_plan()
    configure(plan, 1)
    policy = plan.policy
    assert not configure(plan, 2, **changes)[3]
    assert (plan.policy is policy) == is_kept


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"chunk_size_tokens": 513}, "chunk size 513 is not in 0..512"),
        ({"chunk_size_tokens": -1}, "chunk size -1 is not in 0..512"),
        ({"strategy": "unheard of"}, "unheard of"),
        ({"role": "no role"}, "no role"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_leaves_the_one_before_it_in_force(
    changes: dict[str, Any], error: str
) -> None:
    plan = make_configured("D-heavy")
    *in_force, message = configure(plan, 2, **changes)
    assert in_force == [1, "D-heavy", 256]
    assert error in message
    assert plan.last_chunk_size_tokens == 256


def test_a_strategy_that_this_engine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_configured("D-heavy")
    assert configure(plan, 2, strategy="DynaServe")[3] == ""
    assert configure(plan, 3)[3] == ""
    monkeypatch.setattr(received_plan, "CAPABILITIES", frozenset())
    assert configure(plan, 4, strategy="DynaServe", role="D-heavy") == (
        3,
        "P-heavy",
        256,
        "strategy 'dynaserve' needs split; this engine offers none of these",
    )


def test_the_decodes_know_the_role_in_force_and_whether_the_engine_drains() -> None:
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=64)
    plan = ReceivedPlan(decodes, max_batch_tokens=512)
    assert (decodes.role, decodes.is_draining) == ("D-heavy", False)
    configure(plan, 1, is_draining=True)
    assert (decodes.role, decodes.is_draining) == ("P-heavy", True)
    configure(plan, 2, role="no role", is_draining=False)
    assert (decodes.role, decodes.is_draining) == ("P-heavy", True)
    configure(plan, 3, role="D-heavy")
    assert (decodes.role, decodes.is_draining) == ("D-heavy", False)


def test_chunk_size_0_keeps_the_size_that_started_prefills_end_with() -> None:
    plan = make_configured("D-heavy")
    assert configure(plan, 2, chunk_size_tokens=512)[2] == 512
    assert configure(plan, 3, chunk_size_tokens=0)[2] == 0
    assert (plan.command.chunk_size_tokens, plan.last_chunk_size_tokens) == (0, 512)
