"""Decodes of an engine, for the tests of their flow."""

import random

from sluice_core.kv_blocks import KvBlocks
from sluice_core.records import RequestId, Role
from sluice_core.scheduling.decode_flow import (
    FlowPolicy,
)
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.strategy_parameters import StrategyParameters

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY


BLOCK = 16


TAU = 0.05


def make_decodes(role=D, *, total=1000, used=0, pinned=0, max_num_seqs=1000):
    decodes = DecodeSet(block_size_tokens=BLOCK, max_num_seqs=max_num_seqs)
    decodes.role = role
    decodes.observe_kv(KvBlocks(total=total, used=used, pinned=pinned))
    return decodes


def join(decodes, name, *, now=0.0, output_tokens=1, length=None, tpot_s=0.0, tau=TAU, moved=False, **fields):
    """Join a decode whose TPOT so far is ``tpot_s``."""
    decodes.join(
        RequestId(name),
        output_tokens=output_tokens,
        output_tokens_since_reset=output_tokens if length is None else length,
        first_token_s=now - tpot_s * (output_tokens - 1),
        tpot_slo_s=tau,
        is_moved_in=moved,
        **{"prompt_tokens": 160} | fields,
    )


def make_policy(**changes):
    switches = {key: changes.pop(key) for key in ("moves_first_decodes", "degrades", "flows_back") if key in changes}
    parameters = {"watermark": 0.9, "min_tokens_between_moves": 16} | changes
    return FlowPolicy(StrategyParameters(**parameters), random.Random(0), **switches)


def names(proposals):
    return [proposal.request_id for proposal in proposals]
