"""The answer to ``Control.GetStatus``, and when it is news for those who poll."""

from __future__ import annotations

from sluice.v1 import control_pb2, engine_pb2, plan_pb2
from sluice_core.latency import OnlineLatencyModel
from sluice_router.scheduling import wire_conversion
from sluice_router.scheduling.entities import EngineEndpoint
from sluice_router.scheduling.state import EnginePool, RequestStatistics, RouterState, RouterStatus
from sluice_router.scheduling.status.readiness import why_not_ready

# A finished request is news, but not each of them at once.
PROGRESS_INTERVAL_S = 1.0
_SERVING = (control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_DRAINING)


def note_progress(status: RouterStatus, statistics: RequestStatistics, now: float) -> None:
    """Makes arrived and finished requests news for those who poll, once a second."""
    num_ended = sum(counters.num_finished for counters in statistics.attainment.totals.values())
    number = num_ended + statistics.num_arrived
    if number != status.num_reported and now - status.reported_s >= PROGRESS_INTERVAL_S:
        status.num_reported, status.reported_s = number, now
        status.mark_changed()


def describe(state: RouterState, now: float) -> control_pb2.GetStatusResponse:
    """Builds the answer to ``Control.GetStatus``; durations only, no times."""
    del now
    plan = state.active.plan
    acknowledged = [
        engine.acknowledged_generation for engine in state.engines.connected.values() if engine.status in _SERVING
    ]
    return control_pb2.GetStatusResponse(
        version=state.status.version,
        router_id=state.router_id,
        cluster_uid=plan.cluster_uid if plan is not None else "",
        generation=plan.generation if plan is not None else 0,
        acknowledged_generation=min(acknowledged, default=0),
        engines=[
            _describe_endpoint(state.engines, address, endpoint, state.model_id)
            for address, endpoint in sorted(state.engines.endpoints.items())
        ],
        classes=[
            control_pb2.ClassCounters(
                name=name,
                num_finished=counters.num_finished,
                num_met_ttft=counters.num_met_ttft,
                num_met_tpot=counters.num_met_tpot,
                num_met_both=counters.num_met_both,
            )
            for name, counters in sorted(state.statistics.attainment.totals.items())
        ],
        samples=state.statistics.samples,
        num_requests=len(state.requests.live),
        num_waiting=len(state.requests.waiting),
        is_ready=not why_not_ready(state),
        num_failed=state.statistics.num_failed,
        num_arrived=state.statistics.num_arrived,
    )


def _describe_endpoint(
    engines: EnginePool, address: str, endpoint: EngineEndpoint, model_id: str
) -> control_pb2.EngineStatus:
    engine = endpoint.engine
    if engine is None:
        return control_pb2.EngineStatus(
            address=address, state=control_pb2.ENGINE_STATE_CONNECTING, last_fault=endpoint.last_fault
        )
    # The last report of a lost engine says nothing about now.
    load = engine_pb2.LoadReport() if engine.is_lost else engine.load
    message = control_pb2.EngineStatus(
        engine_id=engine.engine_id,
        epoch=engine.epoch,
        address=address,
        state=engine.status,
        role=plan_pb2.ROLE_UNSPECIFIED if engine.role is None else wire_conversion.ROLE_VALUES[engine.role],
        chunk_size_tokens=engine.chunk_size_tokens,
        max_batch_tokens=engine.spec.max_batch_tokens,
        block_size_tokens=engine.spec.block_size_tokens,
        kv_bytes_per_token=engine.spec.kv_bytes_per_token,
        max_num_seqs=engine.spec.max_num_seqs,
        num_ended=engine.num_ended,
        num_met_both=engine.num_met_both,
        num_failed=engine.num_failed,
        acknowledged_generation=engine.acknowledged_generation,
        running_decodes=load.running_decodes,
        waiting_requests=load.queued_requests,
        queued_prefill_tokens=load.queued_prefill_tokens,
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_granted=load.kv_blocks_granted,
        kv_blocks_pinned=load.kv_blocks_pinned,
        num_moved_in=load.num_moved_in,
        num_moved_out=load.num_moved_out,
        transport=load.transport,
        fingerprint=engine.fingerprint,
        serves_other_model=engine.serves_other_model(model_id),
        last_fault=engine.last_fault or endpoint.last_fault,
    )
    if engines.connected.get(engine.engine_id) is engine and engine.engine_id in engines.table:
        latency = engines.table[engine.engine_id].latency
        message.num_fitted_iterations = latency.num_observations
        message.latency_error_ratio = latency.relative_error
        if isinstance(latency, OnlineLatencyModel) and latency.num_observations:
            message.latency.CopyFrom(control_pb2.LatencyCoefficients(**latency.coefficients._asdict()))
    return message
