"""A whole search for sliders, its runs stood in for by a formula: what it says that it found, and what to expect."""

from __future__ import annotations

import io
import math
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
from formula_harness import FormulaEvaluator
from tuner_harness import make_question

from sluice_core.planning.slider_search import SearchEffort
from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune import search as searching
from sluice_operator.autotune import search_process
from sluice_operator.autotune.search import (
    make_candidate,
    make_effort,
    make_problem,
)
from sluice_operator.autotune.search_messages import SearchResult

if TYPE_CHECKING:
    from sluice_core.planning.trials import SearchTrial
    from sluice_operator.autotune.search_messages import SearchRequest


class Formula(FormulaEvaluator):
    """Attainment is ``target`` at a candidate's goodput, which its share of P-heavy engines and its seed decide."""

    best_rps = 4.0

    @classmethod
    def find_goodput_rps(cls, trial: SearchTrial) -> float:
        candidate = trial.candidate
        distance = abs(candidate.num_prefill_heavy - 3) + abs(math.log2(candidate.prefill_heavy_tokens / 1024))
        distance += abs(candidate.decode_heavy_tokens - 128) / 512
        return cls.best_rps * (1.0 - 0.1 * distance) * (1.0 + 0.01 * (trial.seed % 1000))


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> type[Formula]:
    class Fresh(Formula):
        trials: ClassVar[list[SearchTrial]] = []

    monkeypatch.setattr(searching, "TrialEvaluator", Fresh)
    return Fresh


def ask(rate_rps: float = 2.0, **changes: object) -> SearchRequest:
    question = make_question(replicas=4, chunkSizes={"prefillHeavy": 256, "decodeHeavy": 128}, **changes)
    return replace(question, workload=replace(question.workload, rate_rps=rate_rps))


@pytest.mark.parametrize(
    ("rate_rps", "predicted_rps", "in_force_rps"),
    [(2.0, 2.0, 2.0), (4.5, 4.5, None), (40.0, None, None)],
    ids=["little", "a little too much", "far too much"],
)
def test_a_search_says_what_it_found_and_what_to_expect(formula, rate_rps, predicted_rps, in_force_rps) -> None:
    request = ask(rate_rps)
    result = searching.search(request)
    assert result.sliders == Sliders(num_prefill_heavy=3, prefill_heavy_tokens=1024, decode_heavy_tokens=128)
    # Seeds 1 and 2 of the search; the sliders in force are one engine and two halvings away.
    assert result.goodput_rps == pytest.approx(4.0 * 1.015, rel=0.01)
    assert result.in_force_goodput_rps == pytest.approx(0.7 * 4.0 * 1.015, rel=0.01)
    assert result.gain == pytest.approx(1 / 0.7 - 1, rel=0.03)
    assert result.least_gain == pytest.approx(1 / 0.7 - 1, rel=0.05)
    fresh = [trial for trial in formula.trials if trial.seed in searching.FRESH_SEEDS]
    assert [trial.seed for trial in fresh] == [*searching.FRESH_SEEDS] * 2
    best, present = fresh[:2], fresh[2:]
    assert best[0].candidate.prefill_heavy_tokens == 1024
    assert present[0].candidate == make_candidate(request)
    # Far above the goodput nothing is simulated: 1.3 times it, or of half of the best one's.
    most_rps = searching.MAX_OVERLOAD * result.goodput_rps
    assert best[0].rate_rps == pytest.approx(predicted_rps or most_rps)
    most_rps = searching.MAX_OVERLOAD * result.in_force_goodput_rps
    assert present[0].rate_rps == pytest.approx(in_force_rps or most_rps)
    effort = replace(make_effort(make_problem(request)), most_requests=searching.MAX_PREDICTED_REQUESTS)
    assert [trial.duration_s for trial in fresh] == [effort.choose_duration_s(trial.rate_rps) for trial in fresh]
    for trials, attainment in ((best, result.attainment), (present, result.in_force_attainment)):
        expected = [min(1.0, max(0.0, 0.9 - 4.0 * math.log(t.rate_rps / formula.find_goodput_rps(t)))) for t in trials]
        assert attainment == pytest.approx(sum(expected) / 2)


def test_a_search_is_as_long_as_it_is_told(formula) -> None:
    effort = SearchEffort(seeds=(5,), duration_s=33.0, num_compared=1)
    searching.search(ask(), effort)
    assert {trial.seed for trial in formula.trials} == {5, *searching.FRESH_SEEDS}
    assert max(trial.duration_s for trial in formula.trials) == 33.0


def test_less_than_a_request_in_a_whole_run_is_nothing_and_has_an_attainment(formula) -> None:
    formula.best_rps = 1e-5
    effort = SearchEffort(seeds=(1,), duration_s=100.0, most_duration_s=100.0, num_compared=1)
    result = searching.search(ask(), effort)
    assert (result.goodput_rps, result.in_force_goodput_rps, result.gain, result.least_gain) == (0.0, 0.0, 0.0, 0.0)
    fresh = [trial.rate_rps for trial in formula.trials if trial.seed in searching.FRESH_SEEDS]
    assert fresh == [pytest.approx(searching.MIN_PREDICTED_REQUESTS / 100.0)] * 4
    assert result.attainment == 0.0


def test_what_counts_as_something_is_one_request(formula) -> None:
    formula.best_rps = 0.05
    effort = SearchEffort(seeds=(1,), duration_s=100.0, most_duration_s=100.0, num_compared=1)
    result = searching.search(ask(), effort)
    assert result.goodput_rps == pytest.approx(0.05, rel=0.05)
    assert result.in_force_goodput_rps == pytest.approx(0.035, rel=0.05)
    short = searching.search(ask(), replace(effort, most_duration_s=21.0))
    assert short.goodput_rps == pytest.approx(0.05, rel=0.05)
    assert (short.in_force_goodput_rps, short.gain) == (0.0, math.inf)


# The program around it.


class Limits:
    """What the program asks of its process: noted, since this process goes on."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, text: str, memory_bytes: int = search_process.MAX_MEMORY_BYTES
    ) -> None:
        self.asked: list[tuple[object, ...]] = []
        monkeypatch.setattr(search_process.os, "nice", lambda number: self.asked.append(("nice", number)))
        monkeypatch.setattr(search_process.resource, "setrlimit", lambda *limit: self.asked.append(limit))
        monkeypatch.setattr(search_process.gc, "set_threshold", lambda *limit: None)
        monkeypatch.setattr(search_process.sys, "stdin", io.StringIO(text))
        monkeypatch.setattr(search_process, "find_memory_limit", lambda: memory_bytes)


def test_the_program_answers_a_request_at_low_priority_and_within_limits(formula, monkeypatch, capsys) -> None:
    request = ask()
    limits = Limits(monkeypatch, request.to_json())
    searching.main()
    assert SearchResult.from_json(capsys.readouterr().out) == searching.search(request)
    assert limits.asked == [
        ("nice", search_process.NICENESS),
        (resource.RLIMIT_CPU, (search_process.MAX_CPU_S, search_process.MAX_CPU_S)),
        (resource.RLIMIT_DATA, (search_process.MAX_MEMORY_BYTES, search_process.MAX_MEMORY_BYTES)),
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no chunk size fits"), "no chunk size fits"),
        (MemoryError(), "it needs more than 384 MiB; narrow autotune.bounds"),
    ],
    ids=["request", "memory"],
)
def test_the_program_ends_with_words_for_what_it_cannot_do(monkeypatch, error, words) -> None:
    def fail(text: str) -> str:
        assert text == "a request"
        raise error

    Limits(monkeypatch, "a request")
    with pytest.raises(SystemExit) as ended:
        search_process.serve_request(fail)
    assert ended.value.code == words


@pytest.mark.parametrize(
    ("memory_mib", "words"),
    [
        (100, "it needs more than 100 MiB; narrow autotune.bounds, or raise the operator's memory limit"),
        (63, "the operator's memory limit leaves no room for it; raise it to 432 MiB or more"),
        (-20, "the operator's memory limit leaves no room for it; raise it to 432 MiB or more"),
    ],
)
def test_the_program_says_that_the_operator_s_memory_limit_is_low(monkeypatch, memory_mib, words) -> None:
    def fail(text: str) -> str:
        raise MemoryError

    limits = Limits(monkeypatch, "a request", memory_mib << 20)
    with pytest.raises(SystemExit) as ended:
        search_process.serve_request(fail)
    assert ended.value.code == words
    limited = [limit for limit in limits.asked if limit[0] == resource.RLIMIT_DATA]
    assert limited == ([(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))] if memory_mib == 100 else [])


@pytest.mark.parametrize(
    ("text", "memory_mib"),
    [(None, 384), ("max\n", 384), (f"{8 << 30}\n", 384), (f"{1 << 30}\n", 360), (f"{512 << 20}\n", 104)],
    ids=["no container", "no limit", "8 GiB", "1 GiB", "512 MiB"],
)
def test_searches_share_what_the_container_has_beside_the_operator(tmp_path, text, memory_mib) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    assert search_process.find_memory_limit(file) == memory_mib << 20
