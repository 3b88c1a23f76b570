"""Whole runs, drawn at random, against what they came to when they were recorded.

The plain simulators say what a run has to be, in cells that they model. These runs mix all that a cell may have: every
strategy, failures, drains, joins, little KV, few seats, several routers, late reports, cut prompts, stopped iterations.
A change that is meant to change runs records them anew; whoever reviews it sees in the table which runs moved:

    .venv/bin/python core/tests/test_drawn_runs.py
"""

import csv
import json
import random
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_sim_prefix_reuse import share_prefixes
from test_simulation import SLO, STRATEGIES, make_arrivals, make_engines

from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import EngineId, Role, Slo
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.requests import RequestState
from sluice_core.sim.run_summary import list_latencies, make_report, summarize
from sluice_core.sim.sim_setup import (
    AddEngineEvent,
    Cell,
    ConfigureEvent,
    FailEvent,
    LeaveEvent,
    LengthsKnown,
    NoGrant,
    RouterSetup,
    SimOptions,
    TransferLink,
    TtftEnd,
)
from sluice_core.sim.simulation import Simulation
from sluice_core.strategies import get_strategy
from sluice_core.strategies.dynaserve import DynaServeRules
from sluice_core.strategy_parameters import EarlyRejection, OverloadOrder, PrefillOrder, StrategyParameters

RECORDED = Path(__file__).with_name("drawn_runs.csv")
DRAWN = {
    **STRATEGIES,
    "flowprefill": (get_strategy("flowprefill"), ((2, 2048), (1, 0))),
    "flowprefill, mixed": (get_strategy("flowprefill"), ((1, 512), (2, 256))),
    "dynaserve, cut prompts": (
        replace(get_strategy("dynaserve"), policies=DynaServeRules(cuts_prompts=True)),
        ((3, 2048),),
    ),
    "dynaserve, sides": (
        replace(get_strategy("dynaserve"), policies=DynaServeRules(cuts_prompts=True, is_bound_to_sides=True)),
        ((4, 2048),),
    ),
    "sluice, five": (get_strategy("sluice"), ((5, 512),)),
    "ecoserve, nine": (get_strategy("ecoserve"), ((9, 2048),)),
}
# The row with the most states of its own is drawn most often.
NAMES = [f"{name}/{number}" for name in DRAWN for number in range(25 if name.startswith("flowprefill") else 10)]
# Nothing is in its usual state for long: few blocks and seats, reused prefixes, a change of an engine every second.
CROWDED = "crowded "
NAMES += [
    f"{CROWDED}{name}/{number}"
    for name in DRAWN
    for number in range(30 if name.startswith(("taichi", "ecoserve", "flowprefill", "disaggregated")) else 12)
]
SLOS = (SLO, Slo(ttft_s=0.4, tpot_s=0.03), Slo(ttft_s=9.0, tpot_s=0.2), Slo(ttft_s=0.9, tpot_s=0.06))


def draw_cell(rng, name):
    """Draws what a cell may have; an option that another rules out is left out."""
    strategy, shape = DRAWN[name]
    blocks = rng.choice((26, 60, 150, 400, 2000))
    is_ahead = rng.random() < 0.5
    reuses = rng.random() < 0.3
    order = rng.choice(list(PrefillOrder))
    may_stop = name.startswith("flowprefill") and not is_ahead and order is not PrefillOrder.CHUNKED_EDF
    operators = rng.choice((0, 40, 240)) if may_stop else 0
    link = TransferLink(name=rng.choice(("", "switch")), speed=LinkSpeed(bytes_per_s=rng.choice((1e8, 1e9, 150e9))))
    engines = make_engines(
        shape, blocks=blocks, max_num_seqs=rng.choice((3, 12, 64)), link=link, operators_per_iteration=operators
    )
    options = SimOptions(
        no_grant=rng.choice(list(NoGrant)),
        ttft_end=rng.choice(list(TtftEnd)),
        counts_decodes=rng.random() < 0.7,
        schedules_ahead=is_ahead,
        copies_kv=rng.random() < 0.7,
        hash_block_tokens=48 if reuses else None,
        prefix_report_s=rng.choice((None, 0.0, 0.2)) if reuses else None,
        wait_limit_s=rng.choice((None, 1.0, 5.0)),
        message_s=rng.choice((0.0, 0.0037, 0.05)),
        output_lengths=rng.choice(list(LengthsKnown)),
        sends_parts=rng.random() < 0.7,
        report_s=rng.choice((0.0, 0.0, 0.03, 0.3)),
    )
    other = deepcopy(rng)  # what it draws leaves all that is drawn later as it was
    parameters = StrategyParameters(
        early_rejection=rng.choice(list(EarlyRejection)),
        watermark=rng.choice((0.5, 0.95)),
        approaching_factor=rng.choice((0.6, 0.96)),
        min_tokens_between_moves=rng.choice((4, 16)),
        prefill_batch_tokens=rng.choice((200, 2048)),
        batch_token_budget=rng.choice((300, 4096)),
        prefill_order=order,
        grant_wait_s=rng.choice((0.3, 3.0)),
        tpot_share=rng.choice((0.8, 0.98)),
        late_ttft_factor=rng.choice((1.0, 3.0)),
        late_share=other.choice((0.1, 0.5, 1.0)),
        pace_share=other.choice((0.0, 0.5, 0.8)),
        overload_order=other.choice(list(OverloadOrder)),
        pack_prompt_share=other.choice((0.0, 0.5)),
        pack_share=rng.choice((0.0, 0.7)),
        credit_s=rng.choice((0.0, 0.1)),
        macro_instance_least=rng.choice((1, 2, 4)),
        macro_instance_most=rng.choice((4, 8)),
        split_search_steps=rng.choice((2, 6)),
        split_margin_tokens=rng.choice((0, 20)),
        tbt_target_s=rng.choice((0.0, 0.05)),
    )
    routers = rng.choice(
        ((RouterSetup(),),) * 3 + ((RouterSetup(), RouterSetup(arrival_share=2.0, latency_factor=1.2)),)
    )
    return Cell(
        engines=engines,
        strategy=strategy,
        parameters=parameters,
        options=options,
        events=draw_events(rng, engines, has_roles=strategy.sliders.has_roles),
        seed=rng.randrange(99),
        routers=routers,
    )


def draw_events(rng, engines, *, has_roles):
    """Draws what happens to all engines but the first, which keeps serving; half of the runs have none.

    Strategies without roles have one chunk size everywhere.
    """
    events = []
    for number, setup in enumerate(engines[1:] if rng.random() < 0.5 else []):
        at_s = rng.uniform(0.0, 6.0)
        kind = rng.choice(("fail", "leave", "flip", "drain", "none", "none"))
        if kind == "fail":
            events.append(FailEvent(at_s=at_s, engine_id=setup.engine_id))
        elif kind == "leave":
            events.append(LeaveEvent(at_s=at_s, engine_id=setup.engine_id))
        elif kind != "none":
            change = ConfigureEvent(
                at_s=at_s,
                engine_id=setup.engine_id,
                role=rng.choice(list(Role)),
                chunk_size_tokens=rng.choice((0, 32, 300)) if has_roles else setup.chunk_size_tokens,
                is_draining=kind == "drain",
            )
            chunk_size_tokens = 64 if has_roles else setup.chunk_size_tokens
            back = replace(
                change, at_s=at_s + 2.0, role=setup.role, chunk_size_tokens=chunk_size_tokens, is_draining=False
            )
            events += [change, back]
        if rng.random() < 0.2:
            late = replace(setup, engine_id=EngineId(f"late-{number}"))
            events.append(AddEngineEvent(at_s=rng.uniform(0.0, 6.0), setup=late))
    return events


def crowd(rng, cell, name):
    """Makes a cell crowded; the first engine keeps its role, so that somebody serves."""
    blocks, seats = rng.choice((24, 32, 48, 80)), rng.choice((2, 4, 8, 32))
    speed = LinkSpeed(bytes_per_s=rng.choice((5e7, 3e8, 3e9)))
    engines = [
        replace(each, kv_blocks_total=blocks, max_num_seqs=seats, link=replace(each.link, speed=speed))
        for each in cell.engines
    ]
    reuses = rng.random() < 0.5
    options = replace(
        cell.options,
        no_grant=rng.choice((NoGrant.WAIT, NoGrant.IN_PLACE)),
        hash_block_tokens=rng.choice((16, 32, 48)) if reuses else None,
        prefix_report_s=rng.choice((None, 0.0, 0.1)) if reuses else None,
        schedules_ahead=engines[0].operators_per_iteration == 0 and rng.random() < 0.6,
    )
    events = []
    for number, setup in enumerate(engines):
        at_s = 0.0
        for change in range(rng.choice((0, 2, 4))):
            at_s += rng.uniform(0.1, 2.0)
            role = setup.role if number == 0 else rng.choice(list(Role))
            chunk = rng.choice((0, 32, 300)) if cell.strategy.sliders.has_roles and number else setup.chunk_size_tokens
            kind = rng.choice(("drain", "back", "flip", "flip"))
            if number and change == 3:
                event = rng.choice((FailEvent, FailEvent, LeaveEvent))(at_s=at_s, engine_id=setup.engine_id)
                joins = replace(setup, engine_id=EngineId(f"late-{number}"))
                events += [event, AddEngineEvent(at_s=at_s + rng.uniform(0.0, 1.0), setup=joins)]
                break
            events.append(
                ConfigureEvent(
                    at_s=at_s,
                    engine_id=setup.engine_id,
                    role=setup.role if kind == "back" else role,
                    chunk_size_tokens=chunk if kind == "flip" else setup.chunk_size_tokens,
                    is_draining=kind == "drain",
                )
            )
        else:
            back = ConfigureEvent(
                at_s=at_s + 1.0,
                engine_id=setup.engine_id,
                role=setup.role,
                chunk_size_tokens=setup.chunk_size_tokens,
            )
            events.append(back)
    return replace(cell, engines=engines, options=options, events=events)


def draw_run(name):
    """Draws a cell and its requests: prompts that pile up, answers of one token, four kinds of objectives."""
    rng = random.Random(f"drawn {name}")
    kind = name.removeprefix(CROWDED).partition("/")[0]
    cell = draw_cell(rng, kind)
    longest_prompts, longest_outputs = (300, 700), (30, 90)
    if name.startswith(CROWDED):
        cell = crowd(rng, cell, kind)
        longest_prompts, longest_outputs = (40, 120, 300), (90, 250)
    arrivals = make_arrivals(
        rng,
        number=rng.choice((30, 60)),
        rate=rng.choice((3.0, 8.0, 25.0)),
        longest_prompt=rng.choice(longest_prompts),
        longest_output=rng.choice(longest_outputs),
        slos=SLOS,
        priorities=(0, 0, 1, -1),
    )
    hash_block_tokens = cell.options.hash_block_tokens
    if hash_block_tokens:
        arrivals = share_prefixes(rng, arrivals, hash_block_tokens=hash_block_tokens)
    return cell, arrivals


def add_up(values):
    """Adds values up, each with a weight of its own, so that two that change places change the sum."""
    return sum((1.0 + 0.618 * index % 1.0) * value for index, value in enumerate(values))


def describe_run(simulation, timeline):
    """Describes a run by figures: of its report, and one for each thing that happened, to all of its kind together."""
    report = make_report([summarize(simulation)])
    use = report.pop("engine_use")
    figures = {}
    for key, value in report.items():
        for inner, each in value.items() if isinstance(value, dict) else [("", value)]:
            figures[f"{key} {inner}".strip()] = each[0] if isinstance(each, list) else each
    names = [each.pop("name") for each in use]
    figures |= {key.replace("_", " ") + " of engines": add_up(each[key] for each in use) for key in use[0]}
    ended = [request for request in simulation.requests if request.state is RequestState.FINISHED]
    places = {name: number for number, name in enumerate(names, 1)}
    figures |= {
        "who finished": add_up(request.state is RequestState.FINISHED for request in simulation.requests),
        "first tokens": add_up(request.first_token_s for request in ended),
        "last tokens": add_up(request.last_token_s for request in ended),
        "moves of requests": add_up(request.num_moves for request in simulation.requests),
        "preemptions of requests": add_up(request.num_preemptions for request in simulation.requests),
        "latencies": add_up(tpot_s for _, tpot_s in list_latencies(simulation.requests)),
        "gaps": simulation.gaps.num_gaps,
        "time in gaps": simulation.gaps.total_s,
        "ends": simulation.now,
        "iterations' starts": add_up(span.start_s for span in timeline.iterations),
        "iterations' times": add_up(span.duration_s for span in timeline.iterations),
        "iterations' engines": add_up(places[span.engine_id] for span in timeline.iterations),
        "iterations' decodes": add_up(span.num_decodes for span in timeline.iterations),
        "iterations' prefills": add_up(span.prefill_tokens + 0.1 * span.num_chunks for span in timeline.iterations),
        "iterations' blocks": add_up(span.used_blocks for span in timeline.iterations),
        "iterations' context": add_up(span.decode_context_tokens for span in timeline.iterations),
        "transfers' starts": add_up(start_s for _, _, start_s, *_ in timeline.transfers),
        "transfers' ends": add_up(end_s for _, _, _, end_s, *_ in timeline.transfers),
        "transfers' engines": add_up(places[one] + 0.1 * places[other] for *_, one, other in timeline.transfers),
    }
    return figures


def play(name):
    cell, arrivals = draw_run(name)
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    assert simulation.run()
    return simulation, timeline


def read_recorded():
    with RECORDED.open(newline="") as file:
        return {row.pop("run"): row for row in csv.DictReader(file)}


RECORDS = read_recorded() if RECORDED.exists() else {}


@pytest.mark.parametrize("name", NAMES)
def test_a_drawn_run_is_as_it_was_recorded(name):
    simulation, timeline = play(name)
    figures = {key: 0.0 if value is None else float(value) for key, value in describe_run(simulation, timeline).items()}
    expected = {key: float(value) for key, value in RECORDS[name].items() if value}
    assert {
        key: value for key, value in figures.items() if value != pytest.approx(expected.get(key, 0.0), rel=1e-8)
    } == {}


@pytest.mark.parametrize("most_missed", [0, 3, 10])
@pytest.mark.parametrize("name", [f"{name}/0" for name in DRAWN])
def test_a_run_gives_up_exactly_when_more_than_so_many_have_missed(name, most_missed):
    cell, arrivals = draw_run(name)
    whole = Simulation(cell, arrivals)
    assert whole.run()
    num_missed = sum(not request.has_met_slo for request in whole.requests)
    assert whole.num_missed == num_missed
    early = Simulation(cell, arrivals)
    assert early.run(most_missed) == (num_missed <= most_missed)
    assert early.now <= whole.now


def test_the_drawn_runs_have_seen_everything():
    """What no run reaches is not held by them."""
    totals = {key: sum(float(row[key] or 0.0) for row in RECORDS.values()) for key in next(iter(RECORDS.values()))}
    wanted = {key for key in totals if key.startswith(("moves", "preemptions", "rejected", "blocked", "prefix"))}
    assert {key for key in wanted if not totals[key]} <= {"moves manual", "moves migrate"}


@pytest.mark.parametrize("name", ["taichi/0", "dynaserve/1", "flowprefill/2"])
def test_a_trace_for_perfetto_says_what_the_run_did(name):
    simulation, timeline = play(name)
    trace = json.loads("".join(timeline.to_chrome_trace()))
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    names = {(each["pid"], each.get("tid")): each["args"]["name"] for each in events if each["ph"] == "M"}
    assert [names[pid, None] for pid in (1, 2, 3)] == ["engines", "requests", "KV transfers"]
    spans = [each for each in events if each["ph"] == "X"]
    assert len(spans) == len(timeline.iterations)
    for each, span in zip(spans, timeline.iterations, strict=True):
        assert names[each["pid"], each["tid"]] == span.engine_id
        assert (each["ts"], each["dur"]) == (span.start_s * 1e6, span.duration_s * 1e6)
        has_decodes, has_prefills = bool(span.num_decodes), bool(span.prefill_tokens)
        assert each["name"] == {(True, True): "mixed", (False, True): "prefill"}.get(
            (has_decodes, has_prefills), "decode"
        )
        assert each["args"] == {
            "decodes": span.num_decodes,
            "context": span.decode_context_tokens,
            "prefill_tokens": span.prefill_tokens,
            "chunks": span.num_chunks,
        }
    for counter, key, values in (
        ("decodes", "decodes", [span.num_decodes for span in timeline.iterations]),
        ("KV blocks", "used", [span.used_blocks for span in timeline.iterations]),
    ):
        found = [each for each in events if each["ph"] == "C" and each["name"].endswith(counter)]
        assert [each["args"][key] for each in found] == values
        assert [each["ts"] for each in found] == [span.start_s * 1e6 for span in timeline.iterations]
        expected = [f"{span.engine_id} {counter}" for span in timeline.iterations]
        assert [each["name"] for each in found] == expected
        assert {each["pid"] for each in found} == {1}
    halves = [each for each in events if each["ph"] in {"b", "e"}]
    assert [each["ph"] for each in halves] == ["b", "e"] * (len(halves) // 2)
    assert all((each["cat"], each["tid"]) == ("request", 0) for each in halves)
    found = {}
    for begin, end in zip(halves[::2], halves[1::2], strict=True):
        assert [begin[key] for key in ("pid", "id", "name")] == [end[key] for key in ("pid", "id", "name")]
        found.setdefault(begin["pid"], []).append((begin["id"], begin["name"], begin["ts"], end["ts"], begin["args"]))
    ended = {request.index: request for request in simulation.requests if request.state is RequestState.FINISHED}
    for waiting, decoding in pairwise(found[2]):
        if waiting[1] == "decode":
            continue
        request = ended.pop(waiting[0])
        outcome = {
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "met": request.has_met_slo,
        }
        times_us = [each * 1e6 for each in (request.arrival_s, request.first_token_s, request.last_token_s)]
        assert waiting == (request.index, "until first token", *times_us[:2], outcome)
        assert decoding == (request.index, "decode", *times_us[1:], outcome)
    assert not ended
    assert found.get(3, []) == [
        (int(request_id), cause, start_s * 1e6, end_s * 1e6, {"source": source, "target": target})
        for request_id, cause, start_s, end_s, source, target in timeline.transfers
    ]


def write():
    """Records all runs."""
    rows = {name: describe_run(*play(name)) for name in NAMES}
    with RECORDED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", *next(iter(rows.values()))])
        for name, figures in rows.items():
            writer.writerow([name, *("" if not value else f"{float(value):.10g}" for value in figures.values())])


if __name__ == "__main__":
    write()
    sys.stdout.write(f"{len(NAMES)} runs are in {RECORDED}\n")
