"""Metrics, workloads, the goodput search and the timeline of the simulator."""

import json
import math
import pickle
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import SLO, make_arrivals, make_engines, run

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import Slo, SloClass
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.goodput_search import NoGoodputError, bisect_rate, count_allowed_misses, search_goodput
from sluice_core.sim.pickling import RECORDS
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.run_summary import compute_percentile, list_longest_tenth, make_report, summarize
from sluice_core.sim.sim_setup import Arrival, Cell, RouterSetup, SimOptions
from sluice_core.sim.simulation import Simulation
from sluice_core.sim.traces import TraceError, TraceRow, parse_trace
from sluice_core.sim.workload import DrawnWorkload, scale_trace
from sluice_core.slo_attainment import check_slo, compute_tpot_s
from sluice_core.strategies import STRATEGIES, get_strategy
from sluice_core.strategy_parameters import StrategyParameters

ROWS = [TraceRow(prompt_tokens=10 + number, output_tokens=1 + number % 7) for number in range(200)]


def make_cell(**changes):
    return Cell(engines=make_engines(((2, 96), (2, 48)), blocks=200), strategy=get_strategy("taichi"), **changes)


@pytest.fixture(scope="module")
def simulation():
    return run(make_cell(), make_arrivals(random.Random(1), number=200, rate=8.0))


def test_the_summary_counts_what_slo_arithmetic_says(simulation):
    """``sluice_core.slo_attainment`` is the router's; the simulator must judge as it does."""
    summary = summarize(simulation)
    met = ttft = tpot = 0
    for request in simulation.requests:
        outcome = check_slo(
            Slo(ttft_s=request.ttft_slo_s, tpot_s=request.tpot_slo_s),
            request.first_token_s - request.arrival_s,
            compute_tpot_s(request.first_token_s, request.last_token_s, request.output_tokens),
        )
        met, ttft, tpot = met + outcome.met_both, ttft + outcome.met_ttft, tpot + outcome.met_tpot
    assert 0 < met < len(simulation.requests)
    assert (summary.num_met, summary.num_met_ttft, summary.num_met_tpot) == (met, ttft, tpot)
    assert simulation.num_missed == summary.num_requests - met


def test_rejected_requests_count_as_not_met():
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=tokens, output_tokens=2, slo=Slo(ttft_s=9.0, tpot_s=9.0))
        for tokens in (10, 9999)
    ]
    summary = summarize(run(make_cell(), arrivals))
    assert (summary.attainment, summary.num_rejected) == (0.5, 1)
    assert summary.attainment_longest_tenth == 0.0


def test_the_longest_tenth_is_by_prompt_and_of_equals_the_earlier():
    requests = [
        SimRequest(index, Arrival(at_s=0.0, prompt_tokens=tokens, output_tokens=1, slo=SLO))
        for index, tokens in enumerate([5, 9, 9, *[1] * 17])
    ]
    assert [request.index for request in list_longest_tenth(requests)] == [1, 2]


def test_a_one_token_answer_has_no_tpot_and_meets_it():
    request = SimRequest(0, Arrival(at_s=1.0, prompt_tokens=1, output_tokens=1, slo=Slo(ttft_s=1.0, tpot_s=1e-9)))
    request.first_token_s = request.last_token_s = 2.0
    request.state = RequestState.FINISHED
    assert request.tpot_s is None
    assert request.has_met_slo


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 1))
def test_percentiles_are_nearest_rank(values, share):
    found = compute_percentile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) <= max(0, math.ceil(share * len(values)) - 1)


def run_scarce(seed, slo):
    """A run with moves, preemptions and a request that no engine can hold; with its timeline."""
    arrivals = make_arrivals(random.Random(seed), number=90, rate=25.0, slos=(slo,))
    arrivals.append(replace(arrivals[-1], prompt_tokens=9999))
    cell = replace(make_cell(seed=seed), engines=make_engines(((2, 256), (2, 48)), blocks=40))
    timeline = Timeline()
    simulation = Simulation(cell, arrivals, timeline)
    simulation.run()
    return simulation, timeline


LATE, SLOW = Slo(ttft_s=1.0, tpot_s=99.0), Slo(ttft_s=99.0, tpot_s=0.045)


@pytest.mark.parametrize("slos", [(LATE, LATE), (SLOW, SLOW), (LATE, SLOW)], ids=["ttft", "tpot", "each once"])
def test_every_figure_of_a_report_is_what_the_runs_say(slos):
    runs = [run_scarce(seed, slo)[0] for seed, slo in enumerate(slos, start=1)]
    summaries = [summarize(simulation) for simulation in runs]
    report = make_report(summaries)
    assert report["itl_s"] == summaries[0].itl_s
    finished = [[one for one in simulation.requests if one.state is RequestState.FINISHED] for simulation in runs]
    everything = [one for requests in finished for one in requests]
    ttfts_s = sorted(one.first_token_s - one.arrival_s for one in everything)
    tpots_s = sorted(
        (one.last_token_s - one.first_token_s) / (one.output_tokens - 1) for one in everything if one.output_tokens > 1
    )
    met = [
        [(one.ttft_s <= one.ttft_slo_s, one.tpot_s is None or one.tpot_s <= one.tpot_slo_s) for one in requests]
        for requests in finished
    ]
    for name, judge in (("attainment", all), ("attainment_ttft", lambda x: x[0]), ("attainment_tpot", lambda x: x[1])):
        shares = [sum(map(judge, of_run)) / 91 for of_run in met]
        assert report[name] == pytest.approx(sum(shares) / 2), name
    longest = [sorted(one.requests, key=lambda request: -request.prompt_tokens)[:9] for one in runs]
    assert report["attainment_longest_tenth"] == pytest.approx(
        sum(request.has_met_slo for requests in longest for request in requests) / 18
    )
    for name, values in (("ttft_s", ttfts_s), ("tpot_s", tpots_s)):
        ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        assert report[name] == {key: values[math.ceil(share * len(values)) - 1] for key, share in ranks.items()}
    assert report["moves"] == {cause.value: sum(one.num_moves[cause] for one in runs) for cause in runs[0].num_moves}
    assert report["blocked_moves"] == sum(one.num_blocked_moves for one in runs)
    assert report["preemptions"] == sum(request.num_preemptions for one in runs for request in one.requests) > 2
    assert (report["rejected"], report["requests"]) == (2, 182)
    assert report["attainment_per_seed"] == [sum(map(all, of_run)) / 91 for of_run in met]
    assert report["transfer_share"] == pytest.approx(sum(one.transfer_share for one in summaries) / 2)
    named = {"name": "engine_id", "utilization": "utilization", "kv_use_mean": "kv_use_mean"}
    named |= {"kv_use_peak": "kv_use_peak", "iterations": "num_iterations", "output_tokens": "num_output_tokens"}
    named |= {"prefill_tokens": "num_prefill_tokens", "preemptions": "num_preemptions"}
    engines = summaries[0].engines
    assert report["engine_use"] == [{key: getattr(use, name) for key, name in named.items()} for use in engines]
    assert len({getattr(engines[0], name) for name in named.values()}) == len(named)
    assert json.loads(json.dumps(report)) == report


def test_engines_and_transfers_are_used_as_the_timeline_says():
    simulation, timeline = run_scarce(1, SLO)
    summary = summarize(simulation)
    end_s = max(request.last_token_s for request in simulation.requests)
    assert summary.duration_s == end_s
    for use in summary.engines:
        iterations = [each for each in timeline.iterations if each.engine_id == use.engine_id]
        kv_block_seconds = sum(each.duration_s * each.used_blocks for each in iterations)
        assert use.utilization == pytest.approx(sum(each.duration_s for each in iterations) / end_s)
        # Transfers free and fill blocks while an iteration runs.
        assert use.kv_use_mean == pytest.approx(kv_block_seconds / 40 / end_s, rel=0.1)
        assert use.kv_use_peak == max(each.used_blocks for each in iterations) / 40
        assert use.num_iterations == len(iterations)
        assert use.num_prefill_tokens == sum(each.prefill_tokens for each in iterations)
    moved_s = sum(end_s - start_s for _, _, start_s, end_s, _, _ in timeline.transfers)
    served_s = sum(one.last_token_s - one.arrival_s for one in simulation.requests if one.last_token_s > 0)
    assert summary.transfer_share == pytest.approx(moved_s / served_s)
    assert sum(use.num_output_tokens for use in summary.engines) == sum(
        one.output_tokens for one in simulation.requests[:-1]
    )


def test_records_survive_the_way_between_processes(simulation):
    summary, engine = (
        summarize(simulation),
        replace(make_cell().engines[0], profile=IterationProfile(linear_s=(0.0, 0.5))),
    )
    slo_class = SloClass(name="chat", slo=SLO, priority=1)
    records = [SLO, slo_class, summary, summary.engines[0], engine, engine.profile, engine.link, engine.link.speed]
    strategy = get_strategy("taichi")
    records += [StrategyParameters(), SimOptions(), RouterSetup(), ROWS[0]]
    records += [strategy, strategy.sliders, strategy.parameters[0], *(row.policies for row in STRATEGIES.values())]
    assert pickle.loads(pickle.dumps(records)) == records
    assert {type(record) for record in records} == set(RECORDS)


def test_gaps_of_a_run_are_those_between_its_tokens(simulation):
    """One gap less than tokens per request, and together from first to last token."""
    num_gaps = sum(request.output_tokens - 1 for request in simulation.requests)
    total_s = sum(request.last_token_s - request.first_token_s for request in simulation.requests)
    assert simulation.gaps.num_gaps == num_gaps
    assert simulation.gaps.total_s == pytest.approx(total_s)


@settings(deadline=None)
@given(st.lists(st.floats(1e-4, 50), min_size=1), st.sampled_from((0.01, 0.5, 0.9, 0.99, 1.0)))
def test_gap_percentiles_are_close(gaps_s, share):
    histogram = GapHistogram()
    for gap_s in gaps_s:
        histogram.add(gap_s, 1)
    exact = compute_percentile(sorted(gaps_s), share)
    assert histogram.compute_percentile_s(share) == pytest.approx(exact, rel=0.003)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_value_is_every_percentile(share):
    assert compute_percentile([7.0], share) == 7.0
    assert compute_percentile([], share) is None
    assert compute_percentile([7.0, 8.0], share) == (8.0 if share == 1.0 else 7.0)


# --- workloads


def test_a_run_without_requests_has_no_metrics():
    with pytest.raises(ValueError, match="a run without requests"):
        summarize(Simulation(make_cell(), []))


def test_one_seed_fixes_lengths_and_gaps_and_a_rate_divides_the_gaps():
    slow = DrawnWorkload(ROWS, SLO, seed=1).make_arrivals(2.0, 50.0)
    workload = DrawnWorkload(ROWS, SLO, seed=1)
    workload.make_arrivals(9.0, 50.0)
    fast = workload.make_arrivals(4.0, 25.0)
    assert [arrival.at_s for arrival in slow] == pytest.approx([2 * arrival.at_s for arrival in fast])
    assert [arrival.prompt_tokens for arrival in slow] == [arrival.prompt_tokens for arrival in fast]
    assert [a.prompt_tokens for a in DrawnWorkload(ROWS, SLO, seed=2).make_arrivals(2.0, 50.0)] != [
        a.prompt_tokens for a in slow
    ]


def test_lengths_are_drawn_without_replacement():
    arrivals = DrawnWorkload(ROWS, SLO, seed=1).make_arrivals(10.0, 60.0)
    assert len(arrivals) > 2 * len(ROWS)
    for start in (0, len(ROWS)):
        lengths = [arrival.prompt_tokens for arrival in arrivals[start : start + len(ROWS)]]
        assert sorted(lengths) == [row.prompt_tokens for row in ROWS]


def test_prompts_with_hashes_keep_their_order_and_are_new_ones_each_time_round():
    rows = [replace(row, block_hashes=(number // 10, 100 + number)) for number, row in enumerate(ROWS)]
    arrivals = DrawnWorkload(rows, SLO, seed=1).make_arrivals(10.0, 60.0)
    assert len(arrivals) > 2 * len(rows)
    first = arrivals[0].prompt_tokens - ROWS[0].prompt_tokens
    assert [a.prompt_tokens for a in arrivals[:200]] == [ROWS[(first + n) % 200].prompt_tokens for n in range(200)]
    hashes = [{each for a in arrivals[start : start + 200] for each in a.block_hashes} for start in (0, 200, 400)]
    assert len(hashes[0]) == 20 + 200
    assert not hashes[0] & hashes[1]
    assert not hashes[1] & hashes[2]
    assert {DrawnWorkload(rows, SLO, seed).make_arrivals(1.0, 9.0)[0].prompt_tokens for seed in range(5)} != {
        arrivals[0].prompt_tokens
    }


def test_the_hit_rate_is_the_share_of_prompt_tokens_that_were_found():
    """Of 40 tokens the second prompt finds two blocks of 16; of 30 the third, which shares no hash, none."""
    lengths = ((40, (1,)), (40, (1,)), (30, (2,)))
    arrivals = [
        Arrival(at_s=float(at_s), prompt_tokens=tokens, output_tokens=2, slo=SLO, block_hashes=hashes)
        for at_s, (tokens, hashes) in enumerate(lengths)
    ]
    cell = Cell(engines=make_engines(((1, 96),)), strategy=get_strategy("aggregated"))
    plain = summarize(run(cell, arrivals))
    reusing = summarize(run(replace(cell, options=SimOptions(hash_block_tokens=512)), arrivals))
    assert make_report([plain])["prefix_hit_rate"] is None
    assert make_report([reusing, reusing])["prefix_hit_rate"] == pytest.approx(32 / 110)


def test_the_mean_rate_is_the_wanted_one():
    arrivals = DrawnWorkload(ROWS, SLO, seed=1).make_arrivals(20.0, 500.0)
    assert len(arrivals) / 500.0 == pytest.approx(20.0, rel=0.03)


@pytest.mark.parametrize(("burstiness", "deviation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gaps_are_as_bursty_as_wanted_at_the_same_rate(burstiness: float, deviation: float):
    arrivals = DrawnWorkload(ROWS, SLO, seed=1, burstiness=burstiness).make_arrivals(20.0, 1000.0)
    assert len(arrivals) / 1000.0 == pytest.approx(20.0, rel=0.05)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(arrivals)]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.inf, math.nan])
def test_a_burstiness_that_is_no_positive_number_is_refused(burstiness: float):
    with pytest.raises(ValueError, match=f"burstiness is {burstiness}; a number above 0 is needed"):
        DrawnWorkload(ROWS, SLO, seed=1, burstiness=burstiness)


def test_traces_are_read_with_times_classes_and_objectives():
    rows = parse_trace(["arrival_s,class,input_tokens,output_tokens,ttft_slo_s", "0.5,chat,10,2,0.4", "", "1,,7,1,3"])
    assert rows[0] == TraceRow(prompt_tokens=10, output_tokens=2, arrival_s=0.5, slo_class="chat", ttft_slo_s=0.4)
    assert (rows[1].arrival_s, rows[1].slo_class) == (1.0, "")
    arrivals = scale_trace(rows, SLO, None, 60.0)
    assert [(arrival.at_s, arrival.slo.ttft_s, arrival.slo.tpot_s) for arrival in arrivals] == [
        (0.0, 0.4, SLO.tpot_s),
        (0.5, 3.0, SLO.tpot_s),
    ]
    chat = SloClass(name="chat", slo=Slo(ttft_s=1.0, tpot_s=0.1), priority=5)
    classed = DrawnWorkload(rows, SLO, 1, [chat]).make_arrivals(1.0, 50.0)
    assert {(a.prompt_tokens, a.priority, a.slo.ttft_s, a.slo.tpot_s) for a in classed} == {
        (10, 5, 0.4, 0.1),
        (7, 0, 3.0, SLO.tpot_s),
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: the trace is empty"),
        (["input_tokens"], "line 1: columns are input_tokens; known are"),
        (["input_tokens,output_tokens,colour"], "line 1"),
        (["input_tokens,output_tokens"], "line 2: the trace has no rows"),
        (["input_tokens,output_tokens", "1,2", "1"], "line 3: 1 fields, the header has 2"),
        (["input_tokens,output_tokens", "1,2", "x,2"], "line 3: input_tokens is 'x'"),
        (["input_tokens,output_tokens", "1,0"], "line 2: output_tokens is '0'"),
        (["arrival_s,input_tokens,output_tokens", "nan,1,2"], "line 2: arrival_s is 'nan'"),
        (["arrival_s,input_tokens,output_tokens", "2,1,2", "1,1,2"], "line 3: arrival_s is 1 s before"),
    ],
    ids=["empty", "missing", "unknown", "no rows", "short", "no number", "zero", "nan", "order"],
)
def test_a_wrong_row_is_named_with_its_line(lines, message):
    with pytest.raises(TraceError, match=message.replace("(", r"\(")):
        parse_trace(lines)


def test_trace_times_are_stretched_to_the_rate():
    rows = [TraceRow(prompt_tokens=1, output_tokens=1, arrival_s=10.0 + number**2) for number in range(11)]
    arrivals = scale_trace(rows, SLO, 0.5, 1e9)
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([number**2 * 0.22 for number in range(11)])
    with pytest.raises(ValueError, match="has no arrival_s"):
        scale_trace(ROWS, SLO, 1.0, 10.0)


# --- goodput


@pytest.mark.parametrize("start_rps", [0.01, 2.9, 3.1, 500.0])
def test_the_search_ends_within_two_percent_below_the_limit(start_rps, simulation):
    tried, summary = [], summarize(simulation)

    def attempt(rate_rps):
        tried.append(rate_rps)
        return summary if rate_rps <= 3.0 else None

    found = bisect_rate(attempt, start_rps)
    assert 3.0 / 1.02 <= found.rate_rps <= 3.0
    assert found.rate_rps in tried


def test_a_cell_that_never_passes_is_refused():
    with pytest.raises(NoGoodputError, match="not even"):
        bisect_rate(lambda _: None, 1.0)


def test_a_rate_at_which_nothing_arrives_does_not_pass():
    with pytest.raises(NoGoodputError, match="not even"):
        search_goodput(
            make_cell(), DrawnWorkload(ROWS, Slo(ttft_s=1.0, tpot_s=1.0), seed=1), duration_s=1e-9, start_rps=1.0
        )


def test_goodput_is_a_rate_that_passes_whose_successor_fails():
    workload = DrawnWorkload(ROWS, Slo(ttft_s=0.2, tpot_s=0.05), seed=1)
    found = search_goodput(make_cell(), workload, duration_s=5.0, start_rps=8.0)
    assert found.summary.attainment >= 0.9
    simulation = run(make_cell(), workload.make_arrivals(found.rate_rps, 5.0))
    assert summarize(simulation) == found.summary


@pytest.mark.parametrize("number", [1, 9, 10, 50, 70, 99, 100, 1000])
def test_a_tenth_may_miss_where_nine_tenths_are_asked_for(number):
    assert count_allowed_misses(number, 0.9) == number // 10


@pytest.mark.parametrize(("share", "expected_s"), [(0.0, 0.01), (0.5, 0.01), (0.51, 0.1), (1.0, 0.1)])
def test_percentiles_of_two_gaps_are_the_one_or_the_other(share, expected_s):
    histogram = GapHistogram()
    for gap_s in (0.1, 0.01):
        histogram.add(gap_s, 1)
    assert histogram.compute_percentile_s(share) == pytest.approx(expected_s, rel=2e-3)


# --- timeline


def test_the_timeline_is_a_chrome_trace_whose_iterations_do_not_overlap():
    timeline = Timeline()
    simulation = Simulation(make_cell(), make_arrivals(random.Random(1), number=60, rate=20.0), timeline)
    simulation.run()
    events = json.loads("".join(timeline.to_chrome_trace()))["traceEvents"]
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            assert event["args"].keys() == {"decodes", "context", "prefill_tokens", "chunks"}
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 4
    for spans in tracks.values():
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))
    assert sum(len(spans) for spans in tracks.values()) == sum(e.counters.num_iterations for e in simulation.engines)
    begins = [(e["pid"], e["id"], e["name"]) for e in events if e["ph"] == "b"]
    assert sorted(begins) == sorted((e["pid"], e["id"], e["name"]) for e in events if e["ph"] == "e")
    assert sum(pid == 2 for pid, _, _ in begins) == 2 * 60
    assert sum(pid == 3 for pid, _, _ in begins) == sum(simulation.num_moves.values())


def test_the_whole_trace_of_one_request_that_moves():
    """Prefill on one engine, a transfer of 20 tokens, and two decodes on the other."""
    engines = make_engines(((1, 2048), (1, 0)), blocks=200)
    cell = Cell(engines=engines, strategy=get_strategy("disaggregated"))
    arrival = Arrival(at_s=1.0, prompt_tokens=20, output_tokens=3, slo=Slo(ttft_s=9.0, tpot_s=1e-6))
    timeline = Timeline()
    simulation = Simulation(cell, [arrival], timeline)
    assert simulation.run()
    (request,) = simulation.requests
    profile, link = engines[0].profile, engines[0].link.speed
    ends_s = [1.0, 1.0 + profile.estimate_iteration_s(20, 1, 20, 200.0, 0, 0)]
    ends_s.append(ends_s[-1] + 20 * 196_608 / link.bytes_per_s + link.latency_s)
    ends_s += [ends_s[-1] + profile.estimate_iteration_s(1, 0, 0, 0.0, 1, 21)]
    ends_s += [ends_s[-1] + profile.estimate_iteration_s(1, 0, 0, 0.0, 1, 22)]
    arrives, first, moved, second, last = (pytest.approx(each * 1e6) for each in ends_s)
    prefill, decode = (engine.engine_id for engine in engines)

    def make_name(pid, name, **track):
        return {
            "ph": "M",
            "pid": pid,
            **track,
            "name": f"{'thread' if track else 'process'}_name",
            "args": {"name": name},
        }

    def make_iteration(engine_id, ts, name, duration_s, used, decodes, context, prefill_tokens):
        at = {"pid": 1, "tid": 1 if engine_id == prefill else 2, "ts": ts}
        args = {
            "decodes": decodes,
            "context": context,
            "prefill_tokens": prefill_tokens,
            "chunks": prefill_tokens // 20,
        }
        return [
            {"ph": "X", "name": name, "dur": pytest.approx(duration_s * 1e6), "args": args, **at},
            {"ph": "C", "name": f"{engine_id} decodes", "args": {"decodes": decodes}, **at},
            {"ph": "C", "name": f"{engine_id} KV blocks", "args": {"used": used}, **at},
        ]

    def make_span(pid, name, begins, ends, args):
        at = {"cat": "request", "pid": pid, "tid": 0, "id": 0, "name": name}
        return [{"ph": "b", "ts": begins, "args": args, **at}, {"ph": "e", "ts": ends, **at}]

    outcome = {"prompt_tokens": 20, "output_tokens": 3, "met": False}
    assert json.loads("".join(timeline.to_chrome_trace()))["traceEvents"] == [
        make_name(1, "engines"),
        make_name(2, "requests"),
        make_name(3, "KV transfers"),
        make_name(1, prefill, tid=1),
        make_name(1, decode, tid=2),
        *make_iteration(prefill, arrives, "prefill", ends_s[1] - 1.0, 2, 0, 0, 20),
        *make_iteration(decode, moved, "decode", ends_s[3] - ends_s[2], 2, 1, 21, 0),
        *make_iteration(decode, second, "decode", ends_s[4] - ends_s[3], 2, 1, 22, 0),
        *make_span(2, "until first token", arrives, first, outcome),
        *make_span(2, "decode", first, last, outcome),
        *make_span(3, "prefill_done", first, moved, {"source": prefill, "target": decode}),
    ]
    assert request.num_moves == 1
