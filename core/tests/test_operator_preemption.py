"""Preemption of prefills where an operator ends (FlowPrefill, arXiv:2602.16603, sections 5.1 and 5.2)."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest
from test_flowprefill import FLOWPREFILL, SLOS
from test_simulation import A100_14B, make_arrivals, make_engines, run

from sluice_core.records import Slo
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.sim.chrome_trace import Timeline
from sluice_core.sim.requests import RequestState
from sluice_core.sim.sim_setup import Arrival, Cell, FailEvent, SimOptions
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.strategy_parameters import PrefillOrder, StrategyParameters

CHUNK, OPERATORS, BUDGET = 2048, 240, 1500


def make_cell(num_operators=OPERATORS, shape=((1, CHUNK),), blocks=4000, **changes):
    engines = make_engines(shape, blocks=blocks, max_num_seqs=64, operators_per_iteration=num_operators)
    parameters = StrategyParameters(batch_token_budget=BUDGET)
    return Cell(engines=engines, strategy=FLOWPREFILL, parameters=parameters, **changes)


def count(simulation, name):
    return sum(getattr(engine.counters, name) for engine in simulation.engines)


# --- one engine, played plainly ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prompt:
    """A prompt, and how many of its tokens have the time behind them that they take."""

    number: int
    arrival: Arrival
    computed: float = 0
    first_token_s: float = math.nan


@dataclass(eq=False)
class Task:
    """A batch in the execution pool: what is left of it, and when it last went on."""

    prompts: list
    left_s: float
    left_operators: int
    started_s: float = 0.0
    computed: dict = field(default_factory=dict)

    @property
    def end_s(self):
        return self.started_s + self.left_s


class PlainEngine:
    """Algorithms 1 and 2 read literally: lists that are sorted anew, a pool of tasks, whole prompts."""

    def __init__(self, arrivals):
        self.coming = [Prompt(number, arrival) for number, arrival in enumerate(arrivals)]
        self.all, self.waiting, self.pool = list(self.coming), [], []
        self.running, self.chosen, self.stops_at_s = None, [], math.inf
        self.num_stops = 0
        self.predictor = PrefillPredictor(A100_14B)
        self.predictor.renew(CHUNK, 0)

    def predict_s(self, prompt):
        left = prompt.arrival.prompt_tokens - prompt.computed
        return self.predictor.predict_s(left, left * (prompt.computed + left / 2))

    def find_head(self, now, prompts):
        def key(prompt):
            deadline_s = prompt.arrival.at_s + prompt.arrival.slo.ttft_s
            return deadline_s - self.predict_s(prompt) <= now, deadline_s, prompt.number

        return sorted(prompts, key=key)

    def choose(self, now):
        """Schedule once: at an arrival or a completion."""
        in_pool = [prompt for task in self.pool for prompt in task.prompts]
        running = self.running.prompts if self.running else []
        order = self.find_head(now, self.waiting + in_pool + running)
        if not order or order[0] in self.chosen:
            return
        head = order[0]
        self.chosen = [head]
        if head not in self.waiting:
            return
        deadline_s = head.arrival.at_s + head.arrival.slo.ttft_s
        for prompt in order:
            if prompt is head or prompt not in self.waiting:
                continue
            batch = [*self.chosen, prompt]
            tokens = sum(one.arrival.prompt_tokens for one in batch)
            batch_s = self.predictor.predict_s(tokens, sum(one.arrival.prompt_tokens**2 / 2 for one in batch))
            if deadline_s - now > batch_s and tokens < BUDGET:
                self.chosen = batch

    def start(self, now):
        if not self.chosen:
            return
        task = next((task for task in self.pool if self.chosen[0] in task.prompts), None)
        if task is None:
            prompts = [prompt for prompt in self.chosen if prompt in self.waiting]
            self.waiting = [prompt for prompt in self.waiting if prompt not in prompts]
            lengths = [prompt.arrival.prompt_tokens for prompt in prompts]
            work = sum(length**2 for length in lengths) * 0.5
            duration_s = A100_14B.estimate_iteration_s(sum(lengths), len(prompts), sum(lengths), work, 0, 0)
            task = Task(prompts, duration_s, OPERATORS)
        else:
            self.pool.remove(task)
        task.started_s, self.running = now, task
        task.computed = dict.fromkeys(task.prompts, 0)

    def arrive(self, prompt):
        now, task = prompt.arrival.at_s, self.running
        self.waiting.append(prompt)
        if task is None:
            self.choose(now)
            self.start(now)
            return
        if self.stops_at_s < math.inf:
            self.is_due = True  # the next time that somebody asks
            return
        share = (now - task.started_s) / task.left_s
        for one in task.prompts:
            one.computed = max(1, int(share * one.arrival.prompt_tokens))
        self.choose(now)
        if self.chosen[0] in task.prompts:
            return
        done = math.floor(share * task.left_operators) + 1
        if done < task.left_operators:
            self.stops_at_s = task.started_s + task.left_s * done / task.left_operators

    def play(self):
        self.is_due = False
        while self.coming or self.running:
            arrival_s = self.coming[0].arrival.at_s if self.coming else math.inf
            end_s = self.running.end_s if self.running else math.inf
            if arrival_s <= min(end_s, self.stops_at_s):
                self.arrive(self.coming.pop(0))
                continue
            task, self.running = self.running, None
            if self.stops_at_s < end_s:
                now, self.num_stops = self.stops_at_s, self.num_stops + 1
                done = round((now - task.started_s) / task.left_s * task.left_operators)
                task.left_s, task.left_operators = task.end_s - now, task.left_operators - done
                self.pool.append(task)
            else:
                now, self.is_due = end_s, True
                for prompt in task.prompts:
                    prompt.first_token_s = now
                self.chosen = [prompt for prompt in self.chosen if prompt not in task.prompts]
            self.stops_at_s = math.inf
            if self.is_due:
                self.is_due = False
                self.choose(now)
            self.start(now)
        return self


def make_whole_prompts(seed, number=80, rate=9.0):
    """Prompts that each fit into an iteration, some with a tight objective."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(number):
        at_s += rng.expovariate(rate)
        tokens = rng.choice((rng.randint(900, CHUNK), rng.randint(20, 400), rng.randint(20, 400)))
        slo = Slo(ttft_s=rng.choice((0.15, 0.4, 1.5, 6.0)), tpot_s=1.0)
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=tokens, output_tokens=1, slo=slo))
    return arrivals


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_does_what_the_algorithms_say_read_plainly(seed):
    # The first prompt of a moment is placed at once, the next ones of the same 5 ms wait at the router: none here do.
    arrivals = make_whole_prompts(seed)
    ours, plain = run(make_cell(), arrivals), PlainEngine(arrivals).play()
    for request, prompt in zip(ours.requests, plain.all, strict=True):
        assert request.first_token_s == pytest.approx(prompt.first_token_s, abs=1e-9), prompt.number
    assert count(ours, "num_interrupts") == plain.num_stops >= 5
    assert count(ours, "num_prefill_tokens") == sum(arrival.prompt_tokens for arrival in arrivals)  # nothing twice


# --- what it is worth, and what must hold --------------------------------------------------------------------------


def test_an_urgent_prompt_waits_for_an_operator_and_not_for_an_iteration():
    long = Arrival(at_s=0.0, prompt_tokens=2000, output_tokens=1, slo=Slo(ttft_s=9.0, tpot_s=1.0))
    urgent = Arrival(at_s=0.05, prompt_tokens=50, output_tokens=1, slo=Slo(ttft_s=0.2, tpot_s=1.0))
    alone_s = A100_14B.estimate_iteration_s(50, 1, 50, 1250.0, 0, 0)
    whole_s = A100_14B.estimate_iteration_s(2000, 1, 2000, 2e6, 0, 0)
    timeline = Timeline()
    simulation = Simulation(make_cell(), [long, urgent], timeline)
    assert simulation.run()
    first, second = simulation.requests
    blocking_s = count(simulation, "blocking_s")
    assert 0.0 < blocking_s <= whole_s / OPERATORS
    assert second.first_token_s == pytest.approx(0.05 + blocking_s + alone_s)
    assert first.first_token_s == pytest.approx(whole_s + alone_s)
    assert count(simulation, "busy_s") == pytest.approx(whole_s + alone_s)
    spans = [(span.start_s, span.start_s + span.duration_s) for span in timeline.iterations]
    assert spans == [
        pytest.approx((0.0, 0.05 + blocking_s)),
        pytest.approx((0.05 + blocking_s, second.first_token_s)),
        pytest.approx((second.first_token_s, first.first_token_s)),
    ]
    ends_first = run(make_cell(num_operators=0), [long, urgent])
    assert ends_first.requests[1].first_token_s == pytest.approx(whole_s + alone_s)
    assert count(ends_first, "num_interrupts") == 0


def test_what_has_stopped_counts_as_queued():
    arrivals = [Arrival(at_s=0.0, prompt_tokens=2000, output_tokens=1, slo=Slo(ttft_s=9.0, tpot_s=1.0))]
    arrivals += [Arrival(at_s=0.05, prompt_tokens=50, output_tokens=1, slo=Slo(ttft_s=0.2, tpot_s=1.0))]
    seen = {}

    def note(simulation):
        prefills = simulation.engines[0].prefills
        seen[round(simulation.now, 3)] = (prefills.num_queued, prefills.queued_tokens)
        return []

    assert Simulation(make_cell(), arrivals, steering=Steering(interval_s=0.02, steer=note)).run()
    whole_s = A100_14B.estimate_iteration_s(2000, 1, 2000, 2e6, 0, 0)
    assert seen[0.04] == (0, 0)  # all of it is in the iteration under way
    assert seen[0.06] == (1, pytest.approx(2000 * (1 - 0.05 / whole_s), abs=2 * 2000 / OPERATORS))
    assert seen[0.1] == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"slo": Slo(ttft_s=20.0, tpot_s=1.0)},  # less urgent than what runs
        {"at_s": "last operator"},
    ],
    ids=["less urgent", "too late"],
)
def test_nothing_stops_without_need(changes):
    long = Arrival(at_s=0.0, prompt_tokens=2000, output_tokens=1, slo=Slo(ttft_s=9.0, tpot_s=1.0))
    whole_s = A100_14B.estimate_iteration_s(2000, 1, 2000, 2e6, 0, 0)
    if changes.get("at_s") == "last operator":
        changes = {"at_s": whole_s * (1 - 0.5 / OPERATORS)}
    second = replace(Arrival(at_s=0.05, prompt_tokens=50, output_tokens=1, slo=Slo(ttft_s=0.2, tpot_s=1.0)), **changes)
    assert count(run(make_cell(), [long, second]), "num_interrupts") == 0


def test_an_engine_that_has_died_stops_no_more():
    long = Arrival(at_s=0.0, prompt_tokens=2000, output_tokens=1, slo=Slo(ttft_s=9.0, tpot_s=1.0))
    urgent = Arrival(at_s=0.05, prompt_tokens=50, output_tokens=1, slo=Slo(ttft_s=0.2, tpot_s=1.0))
    whole_s = A100_14B.estimate_iteration_s(2000, 1, 2000, 2e6, 0, 0)
    stops_at_s = (math.floor(0.05 / whole_s * OPERATORS) + 1) * whole_s / OPERATORS
    for fails_at_s, num_interrupts in ((stops_at_s + 1e-9, 1), (stops_at_s - 1e-9, 0)):
        cell = make_cell(shape=((2, CHUNK),))
        dead = cell.engines[0].engine_id
        # The other engine has work of its own, so that both prompts are on the first.
        busy = Arrival(at_s=0.0, prompt_tokens=3500, output_tokens=1, slo=Slo(ttft_s=9.0, tpot_s=1.0))
        cell = replace(cell, events=(FailEvent(at_s=fails_at_s, engine_id=dead),))
        timeline = Timeline()
        simulation = Simulation(cell, [long, busy, urgent], timeline)
        first = simulation.engines[0]
        assert simulation.run()
        assert (first.engine_id, first.is_dead, first.counters.num_interrupts) == (dead, True, num_interrupts)


def test_operators_serve_more_in_time_than_ends_of_iterations():
    missed = {}
    for num_operators in (0, OPERATORS):
        simulation = run(make_cell(num_operators), make_whole_prompts(1, number=400))
        missed[num_operators] = sum(not request.has_met_slo for request in simulation.requests)
    assert count(simulation, "num_interrupts") >= 20
    assert missed[OPERATORS] < 0.7 * missed[0]


@pytest.mark.parametrize("shape", [((2, 512),), ((2, 256), (2, 0)), ((1, 256), (1, 48))], ids=["one", "PD", "hybrid"])
@pytest.mark.parametrize("fails", [False, True], ids=["whole", "an engine dies"])
def test_nothing_is_lost_with_too_few_blocks(shape, fails):
    """``Simulation.check`` finds what is lost, left over or counted twice."""
    num_interrupts = 0
    for seed in range(4):
        arrivals = make_arrivals(
            random.Random(seed), number=60, rate=14.0, slos=(*SLOS, Slo(ttft_s=0.1, tpot_s=0.05)), longest_prompt=340
        )
        cell = make_cell(shape=shape, blocks=24, seed=seed)
        if fails:
            cell = replace(cell, events=(FailEvent(at_s=1.5, engine_id=cell.engines[0].engine_id),))
        simulation = run(cell, arrivals)
        fitting = [r for r in simulation.requests if r.prompt_tokens + r.output_tokens <= 24 * 16]
        assert all(request.state is RequestState.FINISHED for request in fitting)
        num_interrupts += count(simulation, "num_interrupts")
    assert num_interrupts > 0


@pytest.mark.parametrize(
    ("seed", "order", "shape"),
    [
        # A prompt that finds no blocks is selected first, and what has stopped behind it holds them.
        (58, PrefillOrder.CHUNKED_EDF, ((2, 512),)),
        (59, PrefillOrder.CHUNKED_EDF, ((2, 256), (2, 0))),
        # A request to recompute waits for the blocks of what has stopped.
        (52, PrefillOrder.S_EDF, ((2, 256), (2, 0))),
        (99, PrefillOrder.S_EDF, ((1, 256), (1, 48))),
    ],
)
def test_what_has_stopped_goes_on_where_others_wait_for_its_blocks(seed, order, shape):
    slos = (*SLOS, Slo(ttft_s=0.1, tpot_s=0.05))
    arrivals = make_arrivals(random.Random(seed), number=60, rate=14.0, slos=slos, longest_prompt=340)
    cell = make_cell(shape=shape, blocks=24, seed=seed)
    parameters = replace(cell.parameters, prefill_order=order)
    simulation = run(replace(cell, parameters=parameters), arrivals)
    fitting = [r for r in simulation.requests if r.prompt_tokens + r.output_tokens <= 24 * 16]
    assert all(request.state is RequestState.FINISHED for request in fitting)
    assert count(simulation, "num_interrupts") > 0


def test_fewer_than_no_operators_are_refused():
    with pytest.raises(ValueError, match=r"-1 operators per iteration; at least 0"):
        make_cell(num_operators=-1)


def test_engines_that_schedule_ahead_never_stop():
    with pytest.raises(ValueError, match="operators_per_iteration"):
        run(make_cell(options=SimOptions(schedules_ahead=True)), make_whole_prompts(0))
