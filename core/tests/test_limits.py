"""Numbers on which placements, engines, plans and the docs rely; the tests of their modules use them by name."""

import pytest

from sluice_core import kv_copy_rules, router_shares, saved_tpot
from sluice_core.autoscaling import demand_forecast
from sluice_core.latency import kv_capacity
from sluice_core.planning import goodput_comparison, slider_search, workload_shift
from sluice_core.planning.parallelism import phase_goodput
from sluice_core.scheduling import (
    cached_prefix_preference,
    decode_flow,
    decode_set,
    engine_table,
    placement_records,
    router_wait_limit,
    waiting_order,
)
from sluice_core.scheduling.batching import chunked_prefill, profile_table, tpot_slack
from sluice_core.scheduling.splitting import predicted_output_lengths, split_placement, split_search
from sluice_core.sim import cluster, goodput_search, sim_setup, traces
from sluice_core.sim.moves import cut_hand_offs

LIMITS = {
    # Routers.
    "how long a router holds what no engine takes, in seconds": (router_wait_limit.ROUTER_WAIT_LIMIT_S, 30.0),
    "requests of one pass": (waiting_order.MAX_ASSIGNED_AT_ONCE, 256),
    "seconds that a level of priority is worth": (waiting_order.PRIORITY_HEAD_START_S, 10.0),
    "tokens by which an engine of one's own share may be busier": (router_shares.SHARE_MARGIN_TOKENS, 256),
    "queued tokens that a cached one makes up for": (cached_prefix_preference.CACHED_TOKEN_WEIGHT, 8.0),
    "iterations from which on an estimate justifies a rejection": (engine_table.PROVEN_OBSERVATIONS, 100),
    "share of an engine's prefill time for recoveries": (engine_table.RECOVERY_SHARE, 0.5),
    "seconds of recoveries ahead of it": (engine_table.RECOVERY_BURST_S, 0.5),
    "decisions kept for explanations": (placement_records.NUM_RECORDS, 4096),
    "engines kept of each": (placement_records.MAX_RECORDED_ENGINES, 64),
    # Moves.
    "proposals of an engine at a time": (decode_flow.MAX_STANDING_PROPOSALS, 16),
    "seconds before a proposal is made again": (decode_flow.PROPOSAL_BACKOFF_S, 0.25),
    "most of them": (decode_flow.MAX_PROPOSAL_BACKOFF_S, 2.0),
    "tokens between the proposal of a planned move and its hand-off": (decode_set.SPLIT_LEAD_TOKENS, 4),
    "tokens until it is proposed again": (decode_set.SPLIT_RETRY_TOKENS, 16),
    "seconds for which nobody waits for a lost decode": (decode_set.LOST_BACK_OFF_S, 1.0),
    "tokens that are computed rather than pulled": (kv_copy_rules.SHORT_TAIL_TOKENS, 64),
    "blocks that are": (kv_copy_rules.SHORT_TAIL_BLOCKS, 2),
    "parts of a copy": (kv_copy_rules.MAX_COPY_PARTS, 4),
    "tokens from the end of a copy to its hand-off": (kv_copy_rules.HAND_OFF_TOKENS, 4),
    # Batches.
    "recomputed tokens of an iteration without a chunk": (chunked_prefill.RECOMPUTE_TOKENS, 2048),
    "longest time without progress of prefills, in seconds": (chunked_prefill.MIN_PROGRESS_INTERVAL_S, 0.25),
    "tokens of such a progress": (chunked_prefill.MIN_PROGRESS_TOKENS, 128),
    "share of iterations that are as short as profiled": (profile_table.PERCENTILE, 0.99),
    "seconds by which a decode is lost": (tpot_slack.LOST_SLACK_S, 1.0),
    "TPOT objective that is none, in seconds": (saved_tpot.NO_OBJECTIVE_S, 1e8),
    # Splits.
    "tokens of a part": (split_placement.LEAST_PART_TOKENS, 16),
    "quantile of outputs": (predicted_output_lengths.QUANTILE, 0.5),
    "outputs that are remembered": (predicted_output_lengths.WINDOW, 256),
    "tokens of an output before the first": (predicted_output_lengths.UNKNOWN_TOKENS, 256),
    "seconds between two parts that count as balanced": (split_search.TOLERANCE_S, 0.001),
    # Simulations.
    "tokens of a block": (sim_setup.BLOCK_SIZE_TOKENS, 16),
    "running requests of an engine": (sim_setup.MAX_NUM_SEQS, 256),
    "tokens of a batch": (sim_setup.MAX_BATCH_TOKENS, 16_384),
    "seconds of a message": (sim_setup.MESSAGE_S, 0.0037),
    "seconds between two questions to a placement": (cluster.ASSIGN_INTERVAL_S, 0.005),
    "seconds of a grant": (cut_hand_offs.GRANT_TTL_S, 2.0),
    "tokens of a hash of Mooncake's": (traces.HASH_BLOCK_TOKENS, 512),
    "precision of a goodput": (goodput_search.GOODPUT_PRECISION, 0.02),
    # Memory.
    "share of a GPU's memory": (kv_capacity.MEMORY_SHARE, 0.9),
    "bytes of activations": (kv_capacity.ACTIVATION_BYTES, 3_000_000_000),
    # Plans.
    "precision of goodputs that are compared": (goodput_comparison.COMPARISON_PRECISION, 0.04),
    "engines that are explored": (slider_search.MOST_EXPLORED_ENGINES, 16),
    "requests of a run that says something": (phase_goodput.LEAST_REQUESTS, 30),
    "seconds of a run": (phase_goodput.MOST_DURATION_S, 600.0),
    "ratio of means that have shifted": (workload_shift.SHIFT_RATIO, 1.25),
    "seconds in which arrivals are counted": (demand_forecast.BIN_S, 15.0),
    "seconds of what arrives now": (demand_forecast.MINUTE_S, 60.0),
    "seconds of what usually arrives": (demand_forecast.HOUR_S, 3600.0),
    "seconds in which a burst fades": (demand_forecast.FADE_S, 100.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_is_what_others_rely_on(name):
    number, expected = LIMITS[name]
    assert number == expected


def test_a_plan_is_searched_with_three_seeds_and_runs_of_some_minutes():
    assert slider_search.SearchEffort() == slider_search.SearchEffort(
        seeds=(1, 2, 3),
        duration_s=None,
        num_requests=2400,
        least_duration_s=60.0,
        most_duration_s=600.0,
        most_requests=4500,
        filled_s=0.0,
        num_compared=4,
    )
