"""What an answer says of its use: of one choice, of several, and on the wire; and of its tokens' logprobs."""

from __future__ import annotations

import math

import pytest
from edge_fakes import LENGTH

from sluice.v1 import engine_pb2
from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.logprobs import format_chat_logprobs, format_completion_logprobs
from sluice_router.api.openai_responses import add_usages, format_usage
from sluice_router.scheduling.requests import Finish, Usage
from sluice_router.text.output import Delta


def make_usage(number: int, *, tpot_s: float | None = 0.02, is_slo_met: bool = True) -> Usage:
    """Of the choice ``number``: each field has a figure of its own, larger for larger numbers."""
    return Usage(
        prompt_tokens=100 + number,
        output_tokens=200 + number,
        cached_tokens=10 + number,
        ttft_s=0.5 + number,
        tpot_s=tpot_s,
        num_hand_offs=3 + number,
        num_recoveries=1 + number,
        is_slo_met=is_slo_met,
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_choices_are_summed_a_prompt_counts_once_and_times_are_the_worst(n: int, order: tuple[int, ...]) -> None:
    tpots_s = (0.02, None, 0.03, 0.01)
    prompts = order[::n]
    assert add_usages([make_usage(number, tpot_s=tpots_s[number]) for number in order], n) == Usage(
        prompt_tokens=sum(100 + number for number in prompts),
        output_tokens=806,
        cached_tokens=sum(10 + number for number in prompts),
        ttft_s=3.5,
        tpot_s=0.03,
        num_hand_offs=18,
        num_recoveries=10,
        is_slo_met=True,
    )


def test_one_choice_is_the_answer_and_no_time_per_token_stays_none() -> None:
    usage = make_usage(0, tpot_s=None)
    assert add_usages([usage], 1) is usage
    assert add_usages([usage, make_usage(1, tpot_s=None)], 2).tpot_s is None


@pytest.mark.parametrize(("num_choices", "n"), [(1, 1), (3, 1), (3, 3), (4, 2)])
async def test_an_answer_has_the_usage_of_all_its_choices_whichever_ends_first(num_choices: int, n: int) -> None:
    usages = [make_usage(number) for number in range(num_choices)]
    for order in (range(num_choices), range(num_choices - 1, -1, -1)):
        progress = AnswerProgress(num_choices, n)
        for index in order:
            assert not progress.is_over
            progress.note_end(index, Finish(reason=LENGTH, stop_token_id=None, usage=usages[index]))
        assert progress.is_over
        assert progress.usage == add_usages(usages, n)


@pytest.mark.parametrize("missed", [(0,), (1,), (0, 1)])
def test_one_choice_that_missed_its_objectives_is_enough(missed: tuple[int, ...]) -> None:
    assert not add_usages([make_usage(number, is_slo_met=number not in missed) for number in range(2)], 2).is_slo_met


@pytest.mark.parametrize(("tpot_s", "tpot_ms"), [(0.0201239, 20.124), (None, None)])
@pytest.mark.parametrize("is_slo_met", [True, False])
def test_a_usage_is_written_as_openai_does_with_how_it_was_served(
    tpot_s: float | None, tpot_ms: float | None, *, is_slo_met: bool
) -> None:
    assert format_usage(make_usage(0, tpot_s=tpot_s, is_slo_met=is_slo_met)) == {
        "prompt_tokens": 100,
        "completion_tokens": 200,
        "total_tokens": 300,
        "prompt_tokens_details": {"cached_tokens": 10},
        "ttft_ms": 500.0,
        "tpot_ms": tpot_ms,
        "hand_offs": 3,
        "recoveries": 1,
        "slo_met": is_slo_met,
    }


def test_a_logprob_that_json_cannot_say_is_a_very_small_one(text) -> None:
    entry = engine_pb2.TokenLogprobs(
        logprob=-math.inf, top_token_ids=[5, 6, 7], top_logprobs=[-9998.0, -math.inf, -0.5]
    )
    delta = Delta(text="x", token_ids=[5], logprobs=[entry])
    [token] = format_chat_logprobs(delta, text, 2)["content"]
    assert [token["logprob"], *(other["logprob"] for other in token["top_logprobs"])] == [-9999.0, -9998.0, -9999.0]
    assert format_completion_logprobs(delta, text, 2, 0)[0]["token_logprobs"] == [-9999.0]
