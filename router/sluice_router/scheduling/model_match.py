"""Which engines serve the cluster's model; those of another one are refused."""

from __future__ import annotations

from sluice.v1 import control_pb2
from sluice_router.scheduling.entities import ConnectedEngine
from sluice_router.scheduling.state import ActivePlan, EnginePool, RouterState


def check_model(state: RouterState, engine: ConnectedEngine) -> None:
    """Accepts an engine, or refuses it because its model is not the cluster's.

    If the plan names no model, the first engine's counts, while another engine or a request under way relies on it.
    Fingerprints of one model may differ (dtype, block size, vLLM's version): in a roll both serve and exchange no KV.
    """
    if engine.serves_other_model(state.model_id):
        # Requests were read by this router's tokenizer, for this router's model. Routers of the other model use it.
        engine.last_fault, engine.status = "it serves another model", control_pb2.ENGINE_STATE_REFUSED
        state.engines.table.remove(engine.engine_id)
        return
    plan = state.active.plan
    if plan is not None and plan.model_fingerprint:
        state.active.model = plan.model_fingerprint
    elif not state.active.model or not _is_model_needed(state, engine):
        state.active.model = engine.model
    is_refused = engine.status == control_pb2.ENGINE_STATE_REFUSED
    if state.active.model not in {engine.model, engine.fingerprint}:
        engine.last_fault = f"model {engine.model!r} ({engine.fingerprint}) is not the cluster's {state.active.model!r}"
        engine.status = control_pb2.ENGINE_STATE_REFUSED
        state.engines.table.remove(engine.engine_id)
    elif is_refused:
        engine.status = control_pb2.ENGINE_STATE_READY
        engine.last_fault = ""
    _note_model_length(state.active, state.engines)


def _is_model_needed(state: RouterState, engine: ConnectedEngine) -> bool:
    """Whether another engine serves, or a stream has begun, with the cluster's model."""
    others = any(
        other is not engine and other.status != control_pb2.ENGINE_STATE_REFUSED
        for other in state.engines.connected.values()
    )
    return others or any(request.first_token_s is not None for request in state.requests.live.values())


def _note_model_length(active: ActivePlan, engines: EnginePool) -> None:
    lengths = [
        engine.max_model_len_tokens
        for engine in engines.connected.values()
        if engine.status != control_pb2.ENGINE_STATE_REFUSED
    ]
    if lengths:
        active.max_model_len_tokens = min(lengths)
