"""Edges of what strategies are made of, each with the number that it turns on."""

import math
import random
from dataclasses import replace

import pytest
from placement_harness import make_request

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.records import EngineId, IterationShape, MoveCause, RequestId, Role, Slo
from sluice_core.scheduling.batching.profile_table import ProfileTable
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.scheduling.engine_policy import EngineBatch
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.scheduling.iteration_limits import fit_prefill_budget
from sluice_core.scheduling.prefill_order.slack_order import PrefillPredictor
from sluice_core.scheduling.rolling.macro_instances import MacroInstances
from sluice_core.scheduling.slack.decode_packing import DecodePacking
from sluice_core.scheduling.slack.usual_request import UsualRequest
from sluice_core.scheduling.splitting.predicted_output_lengths import (
    KnownLengths,
    NoisyLengths,
    RunningQuantile,
    predict_output_tokens,
)
from sluice_core.scheduling.waiting_order import MAX_ASSIGNED_AT_ONCE, compute_urgency, select_urgent
from sluice_core.strategies import STRATEGIES, get_strategy
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import WATERMARK, EarlyRejection, StrategyParameters, format_parameters

LINE = IterationProfile(linear_s=(0.01,), slope_s=1e-4, prefill_work_s=1e-8, decode_context_s=1e-7)
CONFIG = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=64, max_batch_tokens=2048)


def make_table(loads, profiles=None, chunk=2048):
    profiles = profiles or [LINE] * len(loads)
    by_id = {EngineId(f"e{number}"): profile for number, profile in enumerate(profiles)}
    table = EngineTable(by_id.__getitem__)
    for engine_id, load in zip(by_id, loads, strict=True):
        load.kv_blocks_total = 1000
        table.add(engine_id, CONFIG, role=Role.PREFILL_HEAVY, chunk_size_tokens=chunk)
        table.report(engine_id, load, 10.0)
    return table


# --- what waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_recoveries", "num_others"),
    [(0, 900), (900, 0), (900, 900), (10, 900), (200, 200), (MAX_ASSIGNED_AT_ONCE, 0)],
)
def test_a_pass_has_room_for_others_beside_recoveries(num_recoveries, num_others):
    # They compare the other way round than by their urgency.
    waiting = [(-number, number < num_recoveries) for number in range(num_recoveries + num_others)]
    random.Random(1).shuffle(waiting)

    def urgency_of(item):
        return compute_urgency(is_recovery=item[1], next_token_due_s=-item[0], priority=0, arrival_s=-item[0])

    selected = select_urgent(waiting, urgency_of)
    if len(waiting) <= MAX_ASSIGNED_AT_ONCE:
        assert selected == waiting
        return
    recoveries = sorted(-item for item, is_recovery in selected if is_recovery)
    others = sorted(-item for item, is_recovery in selected if not is_recovery)
    assert recoveries == list(range(min(num_recoveries, MAX_ASSIGNED_AT_ONCE // 2)))
    room = MAX_ASSIGNED_AT_ONCE - len(recoveries)
    assert others == list(range(num_recoveries, num_recoveries + min(room, num_others)))


# --- baselines -----------------------------------------------------------------------------------------------------


def place(name, table, number, **fields):
    policy = PLACEMENTS[name](StrategyParameters(), random.Random(0))
    decisions = policy.assign(10.0, [make_request(each, tokens=16, **fields) for each in range(number)], table)
    return [getattr(decision, "engine_id", None) for decision in decisions]


def test_round_robin_goes_by_number_whatever_the_order_of_the_table():
    table = make_table([EngineLoad() for _ in range(4)])
    assert place("round_robin", table, 5) == ["e0", "e1", "e2", "e3", "e0"]
    assert place("round_robin", table, 4, excluded=frozenset({EngineId("e1")})) == ["e0", "e2", "e3", "e0"]


def test_an_engine_whose_iterations_hold_one_token_takes_prompts():
    assert place("round_robin", make_table([EngineLoad()], chunk=1), 1) == ["e0"]
    assert place("round_robin", make_table([EngineLoad()], chunk=0), 1) == [None]


def test_least_work_is_of_tokens_then_of_the_share_of_kv():
    loads = [EngineLoad(queued_prefill_tokens=9), EngineLoad(kv_blocks_used=500), EngineLoad(kv_blocks_used=400)]
    assert place("least_work", make_table(loads), 1) == ["e2"]
    assert place("least_work", make_table([EngineLoad(), EngineLoad()]), 1) == ["e0"]
    assert place("least_work", make_table(loads), 2) == ["e2", "e1"]


def test_least_work_compares_shares_of_engines_of_any_size_and_leaves_no_estimate():
    table = make_table([EngineLoad(), EngineLoad()])
    table.report(EngineId("e0"), EngineLoad(kv_blocks_total=100, kv_blocks_used=50), 10.0)
    table.report(EngineId("e1"), EngineLoad(kv_blocks_total=1000, kv_blocks_used=60), 10.0)
    assert place("least_work", table, 1) == ["e1"]
    assert {entry[3] for entry in table.order} == {10.0}


# --- room within a time --------------------------------------------------------------------------------------------


def test_attention_takes_room_in_the_time_of_tokens():
    """0.1 ms per token and 10 ns per pair beside 3 decodes of 1,000 tokens: a pair takes 1e-4 of a token's room."""
    room = fit_prefill_budget(LINE, 0.05, 2048, 3, 3000)
    assert room.tokens == pytest.approx((0.05 - 0.0103 - 0.0003) / 1e-4, abs=8)
    assert room.per_work == pytest.approx(1e-4, rel=0.01)
    steps = IterationProfile(
        linear_s=(0.0, *(0.01 + 1e-4 * 8 * row for row in range(300))), prefill_work_s=1e-8, decode_context_s=1e-6
    )
    found = fit_prefill_budget(steps, 0.1, 2048, 40, 2000)
    used_s = steps.estimate_shape_s(
        IterationShape(prefill_tokens=found.tokens, num_chunks=1, num_decodes=40, decode_context_tokens=2000)
    ) - steps.estimate_shape_s(IterationShape(num_chunks=1, num_decodes=40, decode_context_tokens=2000))
    assert found.per_work == pytest.approx(1e-8 * found.tokens / used_s)


def test_a_predictor_takes_its_first_coefficients_whatever_they_are():
    """A prefill of 1,024 tokens that takes just a second is no reason to keep none."""
    profile = IterationProfile(linear_s=(0.0,), slope_s=1.0 / 1024)
    predictor = PrefillPredictor(profile)
    assert predictor.renew(1024, 0)
    assert predictor.predict_s(1024, 0.0) == pytest.approx(1.0)
    assert not predictor.renew(1024, 0)


# --- Sluice --------------------------------------------------------------------------------------------------------


def compute_urgency_s(router, tokens, *, now=10.0, arrival_s=9.0, ttft_slo_s=2.0):
    return router.compute_urgency(
        now,
        is_recovery=False,
        next_token_due_s=0.0,
        priority=0,
        arrival_s=arrival_s,
        ttft_slo_s=ttft_slo_s,
        prompt_tokens=tokens,
    )[-1]


def test_a_prompt_is_late_by_the_fastest_engine_with_the_square_of_its_length():
    """1 s is left. 2,000 tokens take 0.1 ms each and 5 ns per squared token on the fastest: 0.22 s; 12,000: 1.92 s."""
    router = get_strategy("sluice").make_router(StrategyParameters(late_ttft_factor=3.0), random.Random(1))
    # Before the first pass nothing is known of the engines: nobody is late who has time left.
    assert compute_urgency_s(router, 12_000) == pytest.approx(11.0)
    slow = IterationProfile(linear_s=(0.02,), slope_s=3e-4, prefill_work_s=3e-8)
    fast = IterationProfile(linear_s=(0.0,), slope_s=1e-4, prefill_work_s=1e-8)
    table = make_table([EngineLoad(), EngineLoad()], [slow, fast])
    router.assign(10.0, [make_request(number, arrival_s=9.0) for number in range(2)], table)
    for tokens, is_late in ((2000, False), (7000, False), (7400, True), (12_000, True)):
        assert compute_urgency_s(router, tokens) == pytest.approx(15.0 if is_late else 11.0)
    # Late only if it has not been before: 0.1 ms per token alone would leave time for 7,400 tokens.
    assert 7400 * 1e-4 < 1.0 < 7400 * 1e-4 + 0.5e-8 * 7400**2


def test_slack_is_over_the_iterations_that_are_under_way():
    decodes = DecodeSet(block_size_tokens=16, max_num_seqs=64)
    decodes.join(
        RequestId("d"),
        prompt_tokens=10,
        output_tokens=10,
        output_tokens_since_reset=10,
        first_token_s=9.0,
        tpot_slo_s=0.11,
        is_moved_in=False,
    )
    policy = get_strategy("sluice").make_engine(StrategyParameters(tpot_share=1.0))
    policy.bind(decodes, LINE)

    def limit(**changes):
        batch = EngineBatch(
            chunk_size_tokens=2048,
            last_chunk_size_tokens=2048,
            max_batch_tokens=2048,
            block_size_tokens=16,
            num_new_prompts=1,
            num_decodes=1,
            last_prefill_s=10.0,
            **changes,
        )
        return policy.limits(10.0, batch).prefill_budget_tokens

    # 10 gaps of 110 ms since 9.0 are over at 10.1, 11 at 10.21, 12 at 10.32; one under way takes its time off.
    assert limit() == pytest.approx((0.1 - 0.0101) / 1e-4, rel=0.02)
    assert limit(num_under_way=1, under_way_s=0.03) == pytest.approx((0.21 - 0.03 - 0.0101) / 1e-4, rel=0.02)
    assert limit(num_under_way=2, under_way_s=0.06) == pytest.approx(min(2047, (0.32 - 0.06 - 0.0101) / 1e-4), rel=0.02)


def pack(packing, table, *, tpot_slo_s=1.0, num_blocks=100, excluded=frozenset()):
    move = FlowRequest(
        cause=MoveCause.PREFILL_DONE,
        source=EngineId("e0"),
        num_blocks=num_blocks,
        tpot_slo_s=tpot_slo_s,
        excluded=excluded,
    )
    return packing.target(move, table)


def make_packing(*prompts, **parameters):
    values = {"pack_share": 0.5, "pack_prompt_share": 0.0, "watermark": 0.75}
    usual = UsualRequest()
    for tokens in prompts:
        usual.note_placed(tokens, 1.0)
    return DecodePacking(StrategyParameters(**values | parameters), usual)


@pytest.mark.parametrize(("prompt_share", "target"), [(0.209, "e1"), (0.211, None)])
def test_decodes_gather_where_a_usual_prompt_takes_its_share_of_a_gap(prompt_share, target):
    """1,000 tokens: 10 ms and 0.1 ms each, 50 ms a chunk, and 0.1 us for each of 500,000 pairs."""
    profile = IterationProfile(linear_s=(0.01,), slope_s=1e-4, prefill_base_s=0.05, prefill_work_s=1e-7)
    table = make_table([EngineLoad(), EngineLoad(running_decodes=9)], [profile] * 2)
    assert pack(make_packing(500, 1500, 1000, pack_prompt_share=prompt_share), table) == target


def test_a_decode_leaves_for_an_engine_that_is_fuller_by_a_token_and_for_none_that_is_as_full():
    for context, target in ((999, None), (1000, None), (1001, "e1")):
        loads = [EngineLoad(running_decodes=9, decode_context_tokens=each) for each in (1000, context)]
        assert pack(make_packing(1000), make_table(loads)) == target


@pytest.mark.parametrize(("spare_s", "target"), [(1e-6, "e1"), (-1e-6, None)])
def test_an_engine_has_to_keep_the_objective_with_the_decode_and_its_context(spare_s, target):
    table = make_table([EngineLoad(), EngineLoad(running_decodes=9, decode_context_tokens=9000)])
    with_it_s = LINE.estimate_shape_s(IterationShape(num_decodes=10, decode_context_tokens=9000 + 1600))
    assert pack(make_packing(1000), table, tpot_slo_s=(with_it_s + spare_s) / 0.5) == target


@pytest.mark.parametrize(("num_decodes", "target"), [(46, "e1"), (47, "e1"), (48, None)])
def test_seats_are_filled_up_to_the_watermark(num_decodes, target):
    assert pack(make_packing(1000), make_table([EngineLoad(), EngineLoad(running_decodes=num_decodes)])) == target


def test_decodes_gather_on_no_engine_that_drains_or_that_has_failed_them():
    table = make_table([EngineLoad(), EngineLoad(running_decodes=9)])
    assert pack(make_packing(1000), table) == "e1"
    assert pack(make_packing(1000), table, excluded=frozenset({EngineId("e1")})) is None
    table.configure(EngineId("e1"), role=Role.PREFILL_HEAVY, chunk_size_tokens=2048, is_draining=True)
    assert pack(make_packing(1000), table) is None


@pytest.mark.parametrize(("used_blocks", "reason"), [(980, "seats"), (981, "kv")])
def test_a_prompt_with_blocks_and_no_seat_waits_for_a_seat(used_blocks, reason):
    table = make_table([EngineLoad(running_decodes=64, kv_blocks_used=used_blocks)])
    router = get_strategy("sluice").make_router(StrategyParameters(), random.Random(1))
    (decision,) = router.assign(10.0, [make_request(0, tokens=320, arrival_s=10.0)], table)
    assert decision.reason == reason


# --- EcoServe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_s", "phase_s", "ttft_s", "is_placed"),
    [
        (math.inf, 0.0, 0.2, True),
        (0.06, 0.0, 0.2, True),
        (0.04, 0.0, 0.2, False),
        (math.inf, 0.14, 0.2, True),
        (math.inf, 0.16, 0.2, False),
    ],
)
def test_a_prompt_runs_where_saved_tpot_and_the_phase_leave_it_time(saved_s, phase_s, ttft_s, is_placed):
    """300 tokens take 40.45 ms."""
    table = make_table([EngineLoad(saved_tpot_s=saved_s, prefill_phase_s=phase_s)])
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    request = make_request(0, tokens=300, arrival_s=10.0, ttft_s=ttft_s)
    (decision,) = router.assign(10.0, [request], table)
    assert hasattr(decision, "engine_id") is is_placed
    assert is_placed or decision.reason == "saved_tpot"


def test_a_prompt_waits_until_the_best_engine_would_be_late():
    """The best of both in each of what a prefill costs: 1e-4 s per token but the first, 1e-8 s per pair, 10.4 ms."""
    attention = IterationProfile(linear_s=(0.02,), slope_s=1e-4, prefill_work_s=4e-8)
    tokens_cost = IterationProfile(linear_s=(0.01,), slope_s=4e-4, prefill_work_s=1e-8)
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    least_s = 1000 * 1e-4 * 2047 / 2048 + 1e-8 * 500_000 + 0.0104
    for left_s, reason in ((least_s + 2e-6, "saved_tpot"), (least_s - 2e-6, "least_late")):
        table = make_table([EngineLoad(saved_tpot_s=0.0), EngineLoad(saved_tpot_s=0.0)], [attention, tokens_cost])
        request = make_request(0, tokens=1000, arrival_s=10.0 + left_s - 2.0, ttft_s=2.0)
        (decision,) = router.assign(10.0, [request], table)
        assert decision.reason == reason


def test_a_refused_prompt_may_come_again_once_it_would_no_longer_be_late():
    proven, lateness_s = replace(LINE, num_observations=1000), []
    for rejection in (EarlyRejection.OFF, EarlyRejection.REJECT):
        table = make_table([EngineLoad(saved_tpot_s=0.0, queued_prefill_tokens=9000, queued_requests=1)], [proven])
        router = get_strategy("ecoserve").make_router(StrategyParameters(early_rejection=rejection), random.Random(1))
        (decision,) = router.assign(10.0, [make_request(0, arrival_s=9.8, ttft_s=0.25)], table)
        is_refused = rejection is EarlyRejection.REJECT
        lateness_s.append(decision.retry_after_s if is_refused else decision.predicted_ttft_s - 0.25)
    assert lateness_s[0] > 0.8
    assert lateness_s[1] == pytest.approx(lateness_s[0])


def test_each_pass_finds_anew_how_fast_engines_are():
    slow = IterationProfile(linear_s=(0.01,), slope_s=1e-3)
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    reasons = []
    for profile in (slow, LINE, slow):
        table = make_table([EngineLoad(saved_tpot_s=0.0)], [profile])
        (decision,) = router.assign(10.0, [make_request(0, tokens=1000, arrival_s=8.5, ttft_s=2.0)], table)
        reasons.append(decision.reason)
    assert reasons == ["least_late", "saved_tpot", "least_late"]


@pytest.mark.parametrize(("left_s", "reason"), [(1.02, "saved_tpot"), (1.0, "least_late")])
def test_an_iteration_of_one_token_each_is_what_a_late_prompt_takes(left_s, reason):
    """100 tokens take 10.1 ms each."""
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    table = make_table([EngineLoad(saved_tpot_s=0.0)], chunk=1)
    request = make_request(0, tokens=100, arrival_s=10.0 + left_s - 2.0, ttft_s=2.0)
    (decision,) = router.assign(10.0, [request], table)
    assert decision.reason == reason


@pytest.mark.parametrize(("used_blocks", "is_placed"), [(980, True), (981, False)])
def test_a_prompt_that_just_fits_runs(used_blocks, is_placed):
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    table = make_table([EngineLoad(saved_tpot_s=math.inf, kv_blocks_used=used_blocks)])
    (decision,) = router.assign(10.0, [make_request(0, tokens=320, arrival_s=10.0)], table)
    assert hasattr(decision, "engine_id") is is_placed
    assert is_placed or decision.reason == "kv"


def test_an_engine_that_takes_no_prompts_is_none():
    router = get_strategy("ecoserve").make_router(StrategyParameters(), random.Random(1))
    (decision,) = router.assign(10.0, [make_request(0, arrival_s=10.0)], make_table([EngineLoad()], chunk=0))
    assert decision.reason == "room"


def test_a_prompt_goes_to_the_group_with_fewer_tokens_per_engine():
    macro = MacroInstances(2, 3)
    macro.renew(list(make_table([EngineLoad() for _ in range(5)])))
    three, two = macro.groups
    assert (len(three.engines), len(two.engines)) == (3, 2)
    macro.note_placement(three, 0, 300)
    macro.note_placement(two, 0, 220)
    assert macro.list_by_load() == [three, two]
    macro.note_placement(three, 0, 60)
    assert macro.list_by_load() == [two, three]


# --- DynaServe -----------------------------------------------------------------------------------------------------


def test_a_profile_table_takes_no_iteration_that_took_no_time():
    table = ProfileTable(IterationProfile(linear_s=(0.0,)))
    table.record(IterationShape(prefill_tokens=8, num_chunks=1), 0.1)
    assert len(table) == 0
    table = ProfileTable(LINE)
    table.record(IterationShape(prefill_tokens=8, num_chunks=1), 0.0)
    assert len(table) == 0
    table.record(IterationShape(prefill_tokens=8, num_chunks=1), 0.02)
    assert len(table) == 1


def test_lengths_are_learned_known_and_wrong_by_a_deviation():
    learned = RunningQuantile(quantile=0.5, window=3)
    noisy = NoisyLengths(learned, 0.0, random.Random(1))
    for tokens in (10, 20, 30):
        noisy.observe(tokens)
    assert noisy.predict(make_request()) == learned.predict(make_request()) == 20
    noisy.observe(90)
    noisy.observe(100)
    assert learned.predict(make_request()) == 90
    assert predict_output_tokens(learned, make_request(max_output_tokens=50), 0) == 50
    known = KnownLengths({make_request().request_id: 77})
    known.observe(5)
    assert known.predict(make_request()) == 77
    drawn = [NoisyLengths(known, 10.0, random.Random(seed)).predict(make_request()) for seed in range(400)]
    assert sum(drawn) / 400 == pytest.approx(77, abs=2)
    assert (sum((each - 77) ** 2 for each in drawn) / 400) ** 0.5 == pytest.approx(10, abs=1.5)
    assert min(NoisyLengths(known, 500.0, random.Random(seed)).predict(make_request()) for seed in range(50)) == 1


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "-1", "1.0", "x", "49", "100", "٩٠", "²"])
def test_a_number_is_of_plain_digits_within_its_bounds(value):
    with pytest.raises(ValueError, match=r"parameters\.watermark_percent is"):
        WATERMARK.read(value)


def test_bounds_themselves_are_allowed():
    for value in ("50", "99", "090"):
        WATERMARK.read(value)


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults_are_written_as_they_are_read_and_unknown_ones_are_named(name):
    row = STRATEGIES[name]
    values = row.format_parameters(row.read_parameters({}))
    assert values == format_parameters(row.parameters, StrategyParameters())
    assert row.read_parameters(values) == row.read_parameters({})
    with pytest.raises(ValueError, match=rf"parameters\.what is unknown to strategy '{name}'; known are"):
        row.read_parameters({"what": "1"})
    assert get_strategy(row.title) is get_strategy(name) is row


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("taichi", (1024, 256)),
        ("flowprefill", (1024, 256)),
        ("aggregated", (1024, 1024)),
        ("disaggregated", (4096, 0)),
        ("sluice", (4096, 4096)),
        ("dynaserve", (4096, 4096)),
        ("ecoserve", (4096, 4096)),
    ],
)
def test_chunk_sizes_of_a_spec_mean_what_the_strategy_makes_of_them(name, chunks):
    assert STRATEGIES[name].sliders.resolve(1024, 256, 4096) == chunks
    assert STRATEGIES[name].sliders.has_roles is (name in {"taichi", "disaggregated", "flowprefill"})


def test_an_engine_that_lacks_something_says_what_and_what_it_offers():
    row = next(each for each in STRATEGIES.values() if each.needs)
    with pytest.raises(ValueError, match="this engine offers none of these"):
        row.check_capabilities(frozenset())
    row.check_capabilities(row.needs)


def test_objectives_of_nobody_bound_nothing():
    """Requests without a TPOT objective leave iterations as long as they are."""
    table = make_table([EngineLoad(running_decodes=1, decode_context_tokens=100)])
    router = get_strategy("sluice").make_router(StrategyParameters(), random.Random(1))
    router.assign(10.0, [make_request(0)], table)
    assert 0 < table[EngineId("e0")].room_tokens < 2048
    request = make_request(1)
    free = type(request)(
        request_id=request.request_id, arrival_s=0.0, prompt_tokens=9, slo=Slo(ttft_s=math.inf, tpot_s=math.inf)
    )
    bounded = table[EngineId("e0")].room_tokens
    assert router.assign(10.0, [], table) == []
    router.assign(10.0, [free], table)
    assert table[EngineId("e0")].room_tokens == bounded
    fresh = make_table([EngineLoad(running_decodes=1, decode_context_tokens=100)])
    router.assign(10.0, [free], fresh)
    assert fresh[EngineId("e0")].room_tokens == 2047


def test_splits_and_merges_count_while_there_are_engines():
    states = list(make_table([EngineLoad() for _ in range(9)]))
    macro = MacroInstances(2, 4)
    for number, splits, merges in ((3, 0, 0), (9, 2, 0), (9, 2, 0), (3, 2, 2), (0, 2, 2), (9, 2, 2)):
        macro.renew(states[:number])
        assert (macro.num_splits, macro.num_merges) == (splits, merges)


def test_a_rotation_goes_on_at_the_engine_that_took_the_last_request():
    states = list(make_table([EngineLoad() for _ in range(4)]))
    macro = MacroInstances(4, 8)
    macro.renew(states)
    (group,) = macro.groups
    assert group.position == 0
    macro.note_placement(group, 2, 100)
    macro.note_placement(group, 1, 50)
    assert (group.position, group.num_tokens) == (1, 150)
    macro.renew(states[1:])
    assert macro.groups[0].position == 0  # the same engine, one place further to the front
    macro.renew(states[2:])
    assert macro.groups[0].position == 0
    macro.renew([states[3], states[2]])
    assert macro.groups[0].position == 1
