"""Which engines there are: how they come (addresses, streams, what one says it is); see ``engine_health``."""

from __future__ import annotations

from sluice.v1 import control_pb2, engine_pb2
from sluice_core.records import EngineId
from sluice_router.scheduling import failover, model_match, plan, wire_conversion
from sluice_router.scheduling.entities import ConnectedEngine, EngineEndpoint
from sluice_router.scheduling.resumption import claims
from sluice_router.scheduling.state import EnginePool, RouterState


def set_addresses(state: RouterState, addresses: frozenset[str]) -> None:
    """Takes the addresses that the discovery knows now.

    One that is gone keeps its stream for as long as it lasts: the discovery may be wrong, a working stream is not.
    """
    for address in addresses.difference(state.engines.endpoints):
        state.engines.endpoints[address] = EngineEndpoint()
        state.status.mark_changed()
    for address in set(state.engines.endpoints).difference(addresses):
        forget(state, address)


def find_endpoint(engines: EnginePool, address: str) -> EngineEndpoint:
    """Finds an address; one that the discovery has not named is taken in."""
    return engines.endpoints.setdefault(address, EngineEndpoint())


def forget(state: RouterState, address: str) -> None:
    """Drops an address that has no stream."""
    endpoint = state.engines.endpoints.get(address)
    if endpoint is not None and (endpoint.engine is None or endpoint.engine.is_lost):
        del state.engines.endpoints[address]
        state.status.mark_changed()


def note_fault(state: RouterState, address: str, fault: str, now: float) -> bool:
    """Notes why an address has no stream; whoever waits for the engine behind it waits no longer.

    Returns:
        Whether the fault is news.
    """
    endpoint = state.engines.endpoints.get(address)
    if endpoint is not None and endpoint.engine is not None:
        failover.give_up_resumes(state, endpoint.engine.engine_id, now)
    if endpoint is None or endpoint.last_fault == fault:
        return False
    endpoint.last_fault = fault
    state.status.mark_changed()
    return True


def attach(state: RouterState, address: str, hello: engine_pb2.EngineHello, now: float) -> ConnectedEngine:
    """Takes a new stream into service.

    Requests that the engine kept from an earlier stream of this router resume, unless they went on elsewhere.

    Args:
        state: The router's state.
        address: host:port of the stream.
        hello: What the engine says it is.
        now: The router's clock, in seconds.

    Returns:
        The stream's record.
    """
    engine_id = EngineId(hello.engine_id)
    earlier = state.engines.connected.get(engine_id)
    if earlier is not None:
        reason = "epoch" if earlier.epoch != hello.epoch else "stream"
        failover.lose_engine(state, earlier, reason, now, fault="a newer stream replaced it")
    engine = ConnectedEngine(
        engine_id=engine_id,
        epoch=hello.epoch,
        address=address,
        model=hello.model or hello.fingerprint,
        fingerprint=hello.fingerprint,
        model_id=hello.model_id,
        spec=wire_conversion.spec_from(hello),
        max_model_len_tokens=hello.max_model_len_tokens,
        last_heard_s=now,
        progress_s=now,
        prefix_scheme=wire_conversion.prefix_scheme_from(hello),
        pulls_parts=hello.pulls_parts,
        resume_timeout_s=hello.resume_timeout_s,
    )
    state.engines.connected[engine_id] = engine
    endpoint = find_endpoint(state.engines, address)
    endpoint.engine, endpoint.last_fault = engine, ""
    failover.resume_kept_requests(state, engine, hello.held, now)
    claims.ask_all(state, engine)
    model_match.check_model(state, engine)
    plan.configure(state, engine)
    state.status.mark_changed()
    return engine


def recheck_refused(state: RouterState) -> None:
    """Accepts engines of another model once nobody counts on the old one any more."""
    refused = [item for item in state.engines.connected.values() if item.status == control_pb2.ENGINE_STATE_REFUSED]
    if len(refused) < len(state.engines.connected):
        return
    for engine in refused:
        model_match.check_model(state, engine)
        if engine.status != control_pb2.ENGINE_STATE_REFUSED:
            plan.configure(state, engine)
            state.status.mark_changed()
