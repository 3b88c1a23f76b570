"""The sums that a simulated cluster keeps, against the same counted anew, many times during crowded drawn runs."""

import math
import random
from dataclasses import replace

import pytest
from test_drawn_runs import CROWDED, DRAWN, draw_run
from test_simulation import SLO, STRATEGIES, make_arrivals, make_engines

from sluice_core.records import Role, Slo
from sluice_core.scheduling.engine_policy import EngineBatch, RequestKind
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.sim.engine.gap_histogram import GapHistogram
from sluice_core.sim.engine.prefix_cache import PrefixCache, list_prompt_keys
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import Arrival, Cell, ConfigureEvent, NoGrant, SimOptions
from sluice_core.sim.simulation import Simulation, Steering
from sluice_core.sim.ttft_deadlines import TtftDeadlines
from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import StrategyParameters

CHECK_EVERY_S = 0.071
QUEUED, DECODING, MOVING, PARKED = RequestState.QUEUED, RequestState.DECODING, RequestState.MOVING, RequestState.PARKED


def check_queue(engine, queued):
    """Prefills, by what each has computed; one whose last chunk is under way is no longer queued."""
    prefills, batch = engine.prefills, engine.prefills.batch
    waiting = [request for request in queued if request.num_computed_tokens < request.prefill_tokens]
    assert prefills.num_queued == len(waiting)
    assert prefills.queued_tokens == sum(each.prefill_tokens - each.num_computed_tokens for each in waiting)
    assert prefills.queued_work2 == sum(each.prefill_tokens**2 - each.num_computed_tokens**2 for each in waiting)
    kinds = [request.kind for request in waiting]
    assert batch.num_new_prompts == kinds.count(RequestKind.NEW_PROMPT)
    assert batch.num_started_prefills == kinds.count(RequestKind.STARTED_PREFILL)
    assert batch.num_recomputing == kinds.count(RequestKind.RECOMPUTE) + kinds.count(RequestKind.RECOVERY)
    if prefills.freed is not None:
        assert prefills.freed.is_needed


def count_generated(engine, request):
    return engine.batch.iteration - request.start_iteration


def check_decodes(engine, decoding):
    batch, block_size = engine.batch, engine.setup.block_size_tokens
    assert {request.index for request in batch.list_requests()} == {request.index for request in decoding}
    running = [request for request in decoding if request not in batch.paused]
    contexts = [request.prompt_tokens + count_generated(engine, request) for request in running]
    assert batch.num_decodes == len(running)
    assert batch.context_tokens == sum(contexts)
    assert batch.count_growth_blocks() == sum((tokens - 1) % block_size == 0 for tokens in contexts)
    assert all(0 < count_generated(engine, request) < request.output_tokens for request in decoding)
    assert len(batch.decodes) == len(decoding)


def count_decode_blocks(engine, decoding):
    """Blocks of the KV that each has, with that of the iteration under way."""
    total = 0
    for request in decoding:
        tokens = request.prompt_tokens + count_generated(engine, request) - 1
        is_in_iteration = engine.is_running and not engine.withholds_decodes and request not in engine.batch.paused
        total += -(-(tokens + is_in_iteration) // engine.setup.block_size_tokens)
    return total


def check_blocks(engine, on_way, requests, queued, decoding):
    """Every block belongs to a request; granted and pinned ones to requests on their way, where nothing is ahead."""
    held = count_decode_blocks(engine, decoding)
    held += sum(request.num_blocks for request in [*queued, *engine.arrived])
    assert engine.used_blocks == held + engine.pinned_blocks
    assert engine.free_blocks == engine.setup.kv_blocks_total - engine.used_blocks - engine.granted_blocks >= 0
    if engine.schedules_ahead:
        return
    name = engine.engine_id
    kept = [request.part_blocks for request in requests if request.planned_target == name and request.part_blocks]
    coming = [request.num_blocks for request in on_way if request.target == name and not request.part_tokens]
    leaving = [request.num_blocks for request in on_way if request.source == name]
    leaving += [request.num_blocks for request in requests if request.state is PARKED and request.source == name]
    assert engine.num_incoming == len(coming) + len(engine.arrived) + len(kept)
    assert engine.granted_blocks == sum(coming) + sum(kept)
    assert engine.pinned_blocks == sum(leaving)


def check_counters(engine, queued):
    """Tokens of prefills are completed, lost, or of a prefill under way; those of the iteration count at its end."""
    counters = engine.counters
    begun = sum(request.num_computed_tokens - request.num_cached_tokens for request in queued)
    begun -= engine.prefills.num_tokens if engine.is_running else 0
    begun -= engine.prefills.count_suspended_tokens()
    assert (
        counters.num_prefill_tokens == counters.num_completed_prefill_tokens + counters.num_lost_prefill_tokens + begun
    )
    assert counters.peak_blocks <= engine.setup.kv_blocks_total


def check_report(simulation, engine):
    """What routers were told last is how it is, unless the engine has noted that it has changed."""
    if engine.is_reported and not simulation.cell.options.report_s and len(simulation.routers.routers) == 1:
        told = replace(simulation.table.peek(engine.engine_id).load)  # the engine keeps one record, and changes it
        now = engine.report_load(simulation.now)
        times = ("iteration_remaining_s", "prefill_phase_s", "saved_tpot_s")
        assert replace(told, **{name: getattr(now, name) for name in times}) == now


def check(simulation):
    requests = simulation.requests[: simulation.num_arrived]
    num_output_tokens = sum(request.generated_tokens for request in requests if request.state is not DECODING)
    arrived = {request.index for engine in simulation.list_engines() for request in engine.arrived}
    on_way = [request for request in requests if request.state is MOVING and request.index not in arrived]
    for engine in simulation.list_engines():
        on_engine = [request for request in requests if request.target == engine.engine_id]
        queued = [request for request in on_engine if request.state is QUEUED]
        decoding = [request for request in on_engine if request.state is DECODING]
        num_output_tokens += sum(count_generated(engine, request) for request in decoding)
        check_queue(engine, queued)
        check_decodes(engine, decoding)
        check_counters(engine, queued)
        check_report(simulation, engine)
        if engine.cache is None:
            check_blocks(engine, on_way, requests, queued, decoding)
        else:
            engine.cache.check()
    engines = simulation.engines
    assert sum(engine.counters.num_output_tokens for engine in engines) == num_output_tokens
    assert sum(engine.counters.num_preemptions for engine in engines) == sum(each.num_preemptions for each in requests)
    assert sum(simulation.num_moves.values()) == sum(request.num_moves for request in requests)


@pytest.mark.parametrize("name", [f"{CROWDED}{name}/{number}" for name in DRAWN for number in range(3)])
def test_every_sum_is_that_of_its_parts_at_any_time(name):
    cell, arrivals = draw_run(name)
    times_s = []

    def steer(simulation):
        times_s.append(simulation.now)
        check(simulation)
        return ()

    simulation = Simulation(cell, arrivals, steering=Steering(interval_s=CHECK_EVERY_S, steer=steer))
    assert simulation.run()
    assert len(times_s) > 20
    assert [request.index for request in simulation.requests if request.is_leaving] == []
    assert simulation._prefixes is None or not simulation._prefixes._keys  # of requests that wait no more


@pytest.mark.parametrize("no_grant", NoGrant)
@pytest.mark.parametrize("seed", range(3))
def test_sums_hold_while_finished_prefills_wait_and_roles_change(no_grant, seed):
    """Those that wait for room elsewhere stay then; checked several times an iteration."""
    strategy, shape = STRATEGIES["disaggregated"]
    engines = make_engines(shape, blocks=40)
    prefill, other, *decode = (engine.engine_id for engine in engines)
    events = []
    for at_s, changed in ((0.7, [prefill]), (1.6, decode), (2.3, [other])):
        for engine_id in changed:
            is_prefill = engine_id in (prefill, other)
            roles = (Role.DECODE_HEAVY, Role.PREFILL_HEAVY) if is_prefill else (Role.PREFILL_HEAVY, Role.DECODE_HEAVY)
            sizes = (128, 2048) if is_prefill else (128, 0)
            events += [
                ConfigureEvent(at_s=at_s + later_s, engine_id=engine_id, role=role, chunk_size_tokens=size)
                for later_s, role, size in zip((0.0, 0.4), roles, sizes, strict=True)
            ]
    cell = Cell(engines=engines, strategy=strategy, options=SimOptions(no_grant=no_grant), events=events, seed=seed)
    arrivals = make_arrivals(random.Random(seed), number=60, rate=25.0)
    num_waiting = []

    def steer(simulation):
        check(simulation)
        num_waiting.append(sum(request.state is PARKED for request in simulation.requests))
        return ()

    assert Simulation(cell, arrivals, steering=Steering(interval_s=0.0071, steer=steer)).run()
    assert max(num_waiting) > 0


def test_an_engine_begins_with_nothing():
    policy = get_strategy("taichi").make_engine(StrategyParameters())
    (setup,) = make_engines(((1, 64),), blocks=7)
    changed = []
    engine = SimEngine(setup, policy, GapHistogram(), changed)
    assert changed == [setup.engine_id]  # it reports itself
    counters = engine.counters
    assert counters.busy_s == counters.kv_block_seconds == counters.blocking_s == 0.0
    assert counters.num_iterations == counters.num_interrupts == counters.num_preemptions == counters.peak_blocks == 0
    assert counters.num_output_tokens == counters.num_prefill_tokens == 0
    assert counters.num_completed_prefill_tokens == counters.num_lost_prefill_tokens == 0
    assert not any((engine.has_freed_blocks, engine.is_running, engine.is_dead, engine.is_draining))
    assert not any((engine.hands_off_prefills, engine.withholds_decodes, engine.schedules_late))
    assert (
        engine.finished == engine.prefilled == engine.parted == engine.ending == engine.joined == engine.arrived == []
    )
    assert (engine.duration_s, engine.ends_at_s, engine.num_operators, engine.interrupts_at_s) == (
        0.0,
        0.0,
        0,
        math.inf,
    )
    assert (engine.used_blocks, engine.pinned_blocks, engine.granted_blocks, engine.num_incoming) == (0, 0, 0, 0)
    assert (engine.free_blocks, engine.count_schedulable_blocks(), engine.iteration) == (7, 7, 0)
    prefills = engine.prefills
    assert prefills.num_tokens == prefills.num_chunks == prefills.reserved_blocks == prefills.withheld_tokens == 0
    assert prefills.deferred_blocks == prefills.deferred_cached_blocks == prefills.count_suspended_tokens() == 0
    assert prefills.returned == prefills.completing == prefills.list_started() == engine.batch.paused == []
    assert (prefills.may_admit, prefills.resumed, prefills.freed) == (True, None, None)
    assert prefills.max_started >= 10**9
    assert prefills.batch == EngineBatch(
        chunk_size_tokens=64, last_chunk_size_tokens=64, max_batch_tokens=2048, block_size_tokens=16
    )
    assert engine.report_load(3.0) == EngineLoad(
        kv_blocks_total=7, pull_bytes_per_s=setup.link.speed.bytes_per_s, last_submit_number=0
    )
    engine.check_idle()


def test_a_request_begins_with_what_arrived_and_nothing_else():
    slo = Slo(ttft_s=0.3, tpot_s=0.02)
    arrival = Arrival(at_s=5.0, prompt_tokens=40, output_tokens=9, slo=slo, priority=3, block_hashes=(8,))
    request = SimRequest(7, arrival)
    assert (request.index, request.request_id, request.arrival_s, request.priority) == (7, "7", 5.0, 3)
    assert (request.prompt_tokens, request.output_tokens, request.block_hashes) == (40, 9, (8,))
    assert (request.slo, request.ttft_slo_s, request.tpot_slo_s) == (slo, 0.3, 0.02)
    assert (request.state, request.kind) == (RequestState.WAITING, RequestKind.NEW_PROMPT)
    assert (request.first_token_s, request.last_token_s, request.held_since_s) == (-1.0, -1.0, 0.0)
    assert request.num_computed_tokens == request.num_cached_tokens == request.prefill_tokens == request.num_blocks == 0
    assert request.generated_tokens == request.reset_tokens == request.start_iteration == request.batch_epoch == 0
    assert request.batch_number == request.num_moves == request.num_preemptions == 0
    assert request.split_token == request.part_tokens == request.sent_tokens == request.part_blocks == 0
    assert not any((request.is_leaving, request.is_moved_in, request.has_missed_ttft, request.is_cut))
    assert (request.table, request.source_table, request.source, request.target) == (None,) * 4
    assert (request.planned_target, request.order, request.split_tokens) == (None, (0, 0.0, 0), 0)


def make_request(index, **changes):
    arrival = Arrival(at_s=0.0, prompt_tokens=40, output_tokens=9, slo=SLO)
    request = SimRequest(index, arrival)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize("hash_block_tokens", [None, 16])
def test_whatever_changes_a_load_makes_the_engine_report_anew(hash_block_tokens):
    """Once for each change, however much of the load it touches."""
    policy = get_strategy("taichi").make_engine(StrategyParameters())
    (setup,) = make_engines(((1, 64),), blocks=50)
    changed = []
    engine = SimEngine(setup, policy, GapHistogram(), changed, hash_block_tokens=hash_block_tokens)
    first, coming, lost = (
        make_request(0),
        *(
            make_request(index, generated_tokens=1, first_token_s=0.1, num_blocks=3, target=setup.engine_id)
            for index in (1, 2)
        ),
    )
    cut, whole = (make_request(index, split_token=16, part_tokens=16, num_blocks=1) for index in (3, 4))
    steps = [
        lambda: engine.submit(first, RequestKind.NEW_PROMPT),
        lambda: engine.start(1.0),
        lambda: engine.end(2.0),
        lambda: engine.hand_off(first.request_id, 2.0),
        lambda: engine.resume(first),
        lambda: engine.start(2.0),
        lambda: engine.end(3.0),
        lambda: engine.hand_off(first.request_id, 3.0),
        lambda: engine.release(first.num_blocks, first.num_kv_tokens, first.source_table),
        lambda: engine.reserve(2),
        lambda: engine.reserve_more(2),
        lambda: engine.cancel_grant(4),
        lambda: engine.reserve(3),
        *([lambda: engine.begin_pull(coming)] if hash_block_tokens else []),
        lambda: engine.receive(coming),
        lambda: engine.reserve(3),
        lambda: engine.recompute_arrival(lost),
        lambda: engine.keep_room(cut, 3),
        lambda: engine.give_up_room(cut),
        lambda: engine.keep_room(cut, 3),
        lambda: engine.take_part(cut, 16),
        *([] if hash_block_tokens else [lambda: engine.submit_whole(whole)]),
        lambda: engine.configure(Role.DECODE_HEAVY, 32, is_draining=False),
    ]
    for number, step in enumerate(steps):
        engine.report_load(9.0)
        changed.clear()
        step()
        assert changed == [setup.engine_id], number


@pytest.mark.parametrize(("hash_block_tokens", "block_size"), [(48, 16), (16, 16), (20, 16), (50, 16)])
def test_a_block_is_known_by_the_hash_of_its_last_token_and_its_place(hash_block_tokens, block_size):
    hashes = tuple(range(101, 101 + -(-300 // hash_block_tokens)))
    keys = list_prompt_keys(hashes, 300 // block_size, block_size, hash_block_tokens)
    assert len(set(keys)) == len(keys) == 18
    last_tokens = [position * block_size + block_size - 1 for position in range(18)]
    found = [hashes[token // hash_block_tokens] for token in last_tokens]
    assert [divmod(key, 1 << 24) for key in keys] == [(other, place) for place, other in enumerate(found)]


def test_a_prompt_without_hashes_has_no_keys():
    assert list_prompt_keys((), 3, 16, 48) == []


def test_what_enters_and_leaves_a_cache_is_reported_the_hash_0_too_and_answers_not():
    cache = PrefixCache(5, 16, 16)
    assert (cache.take_changes().stored, cache.take_changes().removed) == (set(), set())
    hashes = (0, 5)
    keys = list_prompt_keys(hashes, 2, 16, 16)
    table = cache.open_table(0, 32, hashes, [])
    cache.extend(table, 32)
    cache.take(1)
    cache.cache_filled_blocks(table, 48)  # a block of the answer
    changes = cache.take_changes()
    assert (changes.stored, changes.removed) == (set(keys), set())
    assert cache.release(table) == 3
    cache.take(3)  # two were empty
    changes = cache.take_changes()
    assert (changes.stored, changes.removed) == (set(), set())
    cache.take(2)
    changes = cache.take_changes()
    assert (changes.stored, changes.removed) == (set(), set(keys))
    cache.check()


@pytest.mark.parametrize("seed", range(20))
def test_who_has_no_first_token_when_ttft_is_over_is_late_once(seed):
    rng = random.Random(seed)
    requests = []
    for index in range(seed):
        slo = Slo(ttft_s=float(rng.randint(1, 6)), tpot_s=1.0)
        arrival = Arrival(at_s=float(index // 2), prompt_tokens=1, output_tokens=1, slo=slo)
        requests.append(SimRequest(index, arrival))
    deadlines = TtftDeadlines(requests)
    late, missed = set(), set()
    for now in range(20):
        due = {each.index for each in requests if each.arrival_s + each.ttft_slo_s < now} - late
        opened = [requests[index] for index in due if requests[index].first_token_s < 0.0]
        opened = [request for request in opened if request.state is not RequestState.REJECTED]
        late |= due
        assert deadlines.mark_late(float(now)) == len(opened)
        missed |= {request.index for request in opened}
        assert missed == {request.index for request in requests if request.has_missed_ttft}
        left = [each.arrival_s + each.ttft_slo_s for each in requests if each.index not in late]
        assert deadlines.next_s == min(left, default=math.inf)
        for request in rng.sample(requests, min(2, len(requests))):
            if rng.random() < 0.5:
                request.first_token_s = 0.0 if rng.random() < 0.5 else now + 0.5
            elif rng.random() < 0.5:
                request.state = RequestState.REJECTED
