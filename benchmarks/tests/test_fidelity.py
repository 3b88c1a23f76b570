"""The simulated side of the fidelity benchmark: each strategy does what is typical of it, and loads may ask for it."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.emulated.arrivals import LoadArrival, load_lengths, make_arrivals
from benchmarks.emulated.load import SEPARATOR, make_request
from benchmarks.emulated.manifests import MODEL_LIMIT_TOKENS, make_cluster_manifest
from benchmarks.fidelity.events import count_emulated
from benchmarks.fidelity.run import URGENT_EVERY, make_settings, make_urgent, parse_options, to_simulated
from benchmarks.fidelity.simulated import make_cell, simulate

from sluice_core.records import Slo
from sluice_core.strategies import STRATEGIES

if TYPE_CHECKING:
    from argparse import Namespace

KV_BLOCKS = 14_232  # as the engines report


def read_options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return parse_options()


@pytest.mark.parametrize(
    ("strategy", "event"),
    [
        ("EcoServe", "phase_switches"),
        ("FlowPrefill", "suspended_prefills"),
        ("DynaServe", "cut_prompts"),
        ("Sluice", "prefill_done"),
    ],
)
def test_every_strategy_does_what_is_typical_of_it(strategy: str, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = read_options(monkeypatch, "--strategies", strategy)
    (setting,) = make_settings(options)
    cell, slo = make_cell(make_cluster_manifest("fidelity", options, setting), KV_BLOCKS)
    lengths = load_lengths(options.trace, limit_tokens=MODEL_LIMIT_TOKENS, limit_output_tokens=256)
    load = make_urgent(make_arrivals(lengths, rate=6.0, seconds=15.0, seed=1), options.urgent_ttft_ms)
    runs = simulate(cell, [to_simulated(arrival, arrival.at_s, slo) for arrival in load], 2)
    assert runs.events[event] >= 5
    assert len(runs.has_met) == len(runs.ttft_s) == 2 * len(load)
    assert runs.ttft_s[: len(load)] != runs.ttft_s[len(load) :]


def test_all_strategies_are_known_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = [strategy.title for strategy in STRATEGIES.values()]
    settings = make_settings(read_options(monkeypatch, "--strategies", ",".join(titles)))
    assert [setting.spec["strategy"] for setting in settings] == titles
    with pytest.raises(SystemExit, match="unknown"):
        make_settings(read_options(monkeypatch, "--strategies", "Nobody"))


def test_urgent_requests_say_so_on_both_sides() -> None:
    load = [LoadArrival(number=number, at_s=0.0, prompt_tokens=5, output_tokens=3) for number in range(8)]
    slo = Slo(ttft_s=4.0, tpot_s=0.07)
    for arrival in make_urgent(load, 1500):
        body = json.loads(make_request(arrival, "tiny", random.Random(1)).split(SEPARATOR, 1)[1])
        simulated = to_simulated(arrival, 2.0, slo)
        is_urgent = arrival.number % URGENT_EVERY == 0
        assert body.get("sluice") == ({"slo_ttft_ms": 1500} if is_urgent else None)
        assert simulated.slo == Slo(ttft_s=1.5 if is_urgent else 4.0, tpot_s=0.07)
        assert simulated.max_output_tokens == body["max_tokens"] == 3


def test_emulated_events_are_those_of_the_router_and_of_the_engines() -> None:
    phase: Any = SimpleNamespace(
        count_moves=lambda: {"split": 5}, counters={"cut_prompts": {("moved",): 3.0, ("whole",): 2.0}}
    )
    engine_events: Any = {"phase_switches": 4}
    assert count_emulated(phase, engine_events) == {"split": 5, "cut_prompts": 3, "phase_switches": 4}
