"""Which engine a moving request goes to, and when none may take or give another one."""

from __future__ import annotations

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.records import EngineId, MoveCause
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_router.limit_type import Limit
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest
from sluice_router.scheduling.state import RouterState

MAX_MOVES_PER_ENGINE = Limit(
    "max_moves_per_engine",
    16,
    "most moves in flight from or to an engine, by all routers of the plan together",
    at_least=1,
)


def pick_target(
    state: RouterState,
    request: LiveRequest,
    source: ConnectedEngine,
    cause: MoveCause,
    now: float,
    *,
    target_id: EngineId | None = None,
) -> tuple[ConnectedEngine | None, str]:
    """Picks the engine to ask; or says why there is none."""
    if state.active.policy is None or state.active.plan is None:
        return None, "no_plan"
    cap = max(1, state.limits[MAX_MOVES_PER_ENGINE] // state.active.plan.num_routers)
    if source.migrations_out >= cap:
        return None, "source_busy"
    since_move = len(request.output_token_ids) - request.moved_at_tokens if request.num_hand_offs else None
    if state.active.policy.is_too_soon(cause, since_move):
        return None, "too_soon"
    if target_id is None:
        unfit = {
            engine.engine_id
            for engine in state.engines.connected.values()
            if engine.migrations_in >= cap or engine.fingerprint != source.fingerprint
        }
        flow_request = FlowRequest(
            cause=cause,
            source=source.engine_id,
            num_blocks=blocks_for_tokens(request.num_tokens + 1, source.spec.block_size_tokens),
            tpot_slo_s=request.slo.tpot_s,
            excluded=frozenset(unfit | request.died_on),
            planned_target=request.route[-1].engine_id if request.route else None,
        )
        target_id = state.active.policy.target(now, flow_request, state.engines.table)
    target = None if target_id is None else state.engines.connected.get(target_id)
    if target is None:
        return None, "no_target"
    if target.fingerprint != source.fingerprint:
        return None, "fingerprint"
    return (target, "") if target.migrations_in < cap else (None, "target_busy")
