"""The data plane's entry points: each takes one event, changes the state, and does the I/O that the state asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from sluice.v1 import control_pb2, engine_pb2, plan_pb2
from sluice_core.records import EngineId, RequestId
from sluice_router.errors import EngineProtocolError, RouterError
from sluice_router.observability.metrics import EngineTraffic
from sluice_router.scheduling import admission, completion, failover, kept_prefills, placement, plan, wait_limits
from sluice_router.scheduling.engines import engine_health, engine_messages, engine_registry
from sluice_router.scheduling.entities import ConnectedEngine, LiveRequest
from sluice_router.scheduling.moves import drain, migration
from sluice_router.scheduling.requests import ClaimTaker, FoundRequest, NewRequest, ResponseStream, ServedModel
from sluice_router.scheduling.resumption import adoption, claims, detachment
from sluice_router.scheduling.state import RouterState
from sluice_router.scheduling.status import control_status, gauges, readiness

logger = logging.getLogger(__name__)

End = TypeVar("End")

# The router's own pauses up to this long are not held against engines.
MAX_TICK_LAG_S = 0.2


class EngineWriter(Protocol):
    """Where messages to engines go; ``engines.EngineConnections`` in production."""

    def send(self, engine: ConnectedEngine, message: engine_pb2.AttachRequest) -> None:
        """Queues a message on the engine's stream; one whose stream is gone is dropped."""
        ...

    def close(self, engine: ConnectedEngine, reason: str) -> None:
        """Ends the engine's stream."""
        ...


class Router:
    """Implements ``requests.DataPlane`` for clients and ``EngineEventHandler`` for engines; serves the control plane.

    Args:
        state: The state; nobody else changes it.
        clock: Monotonic, in seconds.
    """

    def __init__(self, state: RouterState, clock: Callable[[], float]) -> None:
        self.state = state
        self.now = clock
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(gauges.RouterCollector(state, clock))
        self._engine_writer: EngineWriter | None = None
        self._rotation = 0
        self._is_busy = False
        self._late_cancels: list[tuple[RequestId, str]] = []
        self._last_tick_s: float | None = None
        self._listeners: list[Callable[[], None]] = []
        self._seen_version = state.status.version
        self._model = ServedModel(name="", max_model_len_tokens=0, created_s=state.started_unix_s)

    def connect(self, engine_writer: EngineWriter) -> None:
        """Says where messages to engines go."""
        self._engine_writer = engine_writer

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` after every change of ``state.status.version``."""
        self._listeners.append(listener)

    # --- clients -------------------------------------------------------------------------------------------------

    def make_request_id(self) -> RequestId:
        """See ``DataPlane.make_request_id``."""
        return self.state.make_request_id()

    def admit(self, request: NewRequest, response_stream: ResponseStream) -> None:
        """See ``DataPlane.admit``."""
        started_s = time.perf_counter()
        traces = self.state.traces
        if traces is not None:
            traces.begin(request.request_id, request.arrival_s, request.trace_headers)
        try:
            admission.admit(self.state, request, response_stream, self.now())
        except RouterError as error:
            if traces is not None:
                traces.refuse(self.now(), request.request_id, error.code, error.message)
            raise
        finally:
            self.state.metrics.decision_s.observe(time.perf_counter() - started_s)
            self._act()

    def claim(self, key: bytes, taker: ClaimTaker) -> None:
        """See ``DataPlane.claim``."""
        try:
            claims.claim(self.state, key, taker, self.now())
        finally:
            self._act()

    def adopt(
        self, found: FoundRequest, request: NewRequest, response_stream: ResponseStream, stop_at: int | None
    ) -> None:
        """See ``DataPlane.adopt``."""
        now = self.now()
        try:
            adoption.adopt(self.state, found, request, response_stream, now, stop_at=stop_at)
            placement.assign(self.state, now)
        finally:
            self._act()

    def detach(self, request_id: RequestId) -> None:
        """See ``DataPlane.detach``."""
        detachment.detach(self.state, request_id, self.now())

    def cancel(self, request_id: RequestId, reason: str = "client_gone") -> None:
        """See ``DataPlane.cancel``."""
        # A response stream may cancel from within a call of ours: the state is consistent again only after the event.
        if self._is_busy:
            self._late_cancels.append((request_id, reason))
            return
        request = self.state.requests.live.get(request_id)
        if request is not None:
            completion.cancel(self.state, request, reason, self.now())
            self._act()

    @property
    def model(self) -> ServedModel:
        """See ``DataPlane.model``."""
        state = self.state
        plan_in_force = state.active.plan
        name = ""
        if plan_in_force is not None:
            name = plan_in_force.served_models.get(state.model_id, plan_in_force.served_model_name)
        limit = state.active.max_model_len_tokens
        # Asked for several times per request, and changed by plans and engines only.
        if self._model.name != name or self._model.max_model_len_tokens != limit:
            self._model = ServedModel(name=name, max_model_len_tokens=limit, created_s=state.started_unix_s)
        return self._model

    @property
    def is_ready(self) -> bool:
        """See ``DataPlane.is_ready``."""
        return not readiness.why_not_ready(self.state)

    @property
    def is_holding(self) -> bool:
        """See ``DataPlane.is_holding``."""
        return self.state.active.is_holding

    @property
    def not_ready_reason(self) -> str:
        """See ``DataPlane.not_ready_reason``."""
        return readiness.why_not_ready(self.state)

    def format_metrics(self) -> bytes:
        """See ``DataPlane.format_metrics``."""
        return generate_latest(self.registry)

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """See ``DataPlane.explain``."""
        return self.state.decision_log.explain(request_id)

    def set_edge_fault(self, fault: str) -> None:
        """Says why clients cannot be served, whatever the engines; empty: they can."""
        if fault != self.state.status.edge_fault:
            self.state.status.edge_fault = fault
            self.state.status.mark_changed()
            self._act()

    def set_owners(self, owners: frozenset[str]) -> None:
        """Says who has an API key; what is counted of others is forgotten."""
        self.state.metrics.keep_owners(owners)
        self.state.limiter.keep_owners(owners)

    def find_output_limit(self, owner: str) -> int | None:
        """See ``DataPlane.find_output_limit``."""
        limits = self.state.limiter.find_limits(owner)
        return None if limits is None else limits.max_output_tokens or None

    # --- engines -------------------------------------------------------------------------------------------------

    def set_addresses(self, addresses: frozenset[str]) -> None:
        """The discovery knows these addresses now."""
        engine_registry.set_addresses(self.state, addresses)
        self._act()

    @property
    def router_id(self) -> str:
        """Unique per router process."""
        return self.state.router_id

    def traffic_of(self, address: str) -> EngineTraffic:
        """Where the bytes of an address's streams are counted."""
        return engine_registry.find_endpoint(self.state.engines, address).traffic

    def note_fault(self, address: str, fault: str) -> None:
        """An address has no stream, for this reason."""
        now, has_held = self.now(), bool(self.state.requests.awaiting_resume)
        if engine_registry.note_fault(self.state, address, fault, now):
            logger.info("engine at %s: no stream: %s", address, fault)
        if has_held:
            placement.assign(self.state, now)
        self._act()

    def attach(
        self, address: str, hello: engine_pb2.EngineHello, register: Callable[[ConnectedEngine], object]
    ) -> ConnectedEngine:
        """A stream began; the engine's other stream, if there is one, is over.

        Args:
            address: host:port of the stream.
            hello: What the engine says it is.
            register: Called with the stream's record before anything is sent on it.
        """
        engine = engine_registry.attach(self.state, address, hello, self.now())
        register(engine)
        if not self.state.status.is_accepting:
            self.state.outbox.message_to(engine).is_leaving = True
        self._act()
        return engine

    def forget(self, address: str) -> None:
        """An address that the discovery does not know any more has no stream either."""
        engine_registry.forget(self.state, address)
        self._act()

    def handle_message(self, engine: ConnectedEngine, message: engine_pb2.AttachResponse) -> None:
        """Takes one message of an engine."""
        now, state = self.now(), self.state
        self._is_busy = True
        try:
            engine_messages.handle_message(state, engine, message, now)
        except EngineProtocolError as error:
            logger.warning("engine %s: stream given up: %s", engine.engine_id, error)
            failover.lose_engine(state, engine, "protocol", now, fault=str(error))
        finally:
            self._is_busy = False
        state.metrics.count("grpc_messages", "up")
        kept_prefills.place(state, now)
        placement.assign_if_due(state, now)
        self._act()

    def lose(self, engine: ConnectedEngine, fault: str) -> None:
        """An engine's stream ended."""
        now = self.now()
        failover.lose_engine(self.state, engine, "stream", now, fault=fault)
        kept_prefills.place(self.state, now)
        placement.assign(self.state, now)
        self._act()

    def tick(self) -> None:
        """Does what is due by time alone; call it every 50 to 100 ms."""
        now, state = self.now(), self.state
        self._forgive_lag(now)
        for engine in list(state.engines.connected.values()):
            failure = engine_health.find_failure(state.limits, state.engines.table, engine, now)
            if failure is not None:
                reason, fault = failure
                logger.warning("engine %s: %s", engine.engine_id, fault)
                failover.lose_engine(state, engine, reason, now, fault=fault)
                continue
            migration.expire_grants(state, engine, now)
            failover.expire_pulls(state, engine, now)
            if engine.is_draining:
                drain.drain(state, engine, now)
        failover.expire_resumes(state, now)
        claims.expire(state, now)
        detachment.expire(state, now)
        kept_prefills.expire(state, now)
        kept_prefills.place(state, now)
        engine_registry.recheck_refused(state)
        wait_limits.end_replaced(state, now)
        wait_limits.end_abandoned(state, now)
        wait_limits.expire(state, now)
        self._report_usage(now)
        placement.assign_if_due(state, now)
        control_status.note_progress(state.status, state.statistics, now)
        self._act()

    # --- control plane -------------------------------------------------------------------------------------------

    def apply_plan(self, message: plan_pb2.Plan) -> None:
        """Puts a plan in force, or raises ``PlanRefusedError``."""
        try:
            plan.apply_plan(self.state, message)
            kept_prefills.place(self.state, self.now())
            placement.assign(self.state, self.now())
        finally:
            self._act()

    def move(self, request_id: str, engine_id: EngineId) -> str:
        """Begins a manual migration; returns why not, or an empty string."""
        reason = migration.start_manual(self.state, request_id, engine_id, self.now())
        self._act()
        return reason

    def describe(self) -> control_pb2.GetStatusResponse:
        """The state for the control plane."""
        return control_status.describe(self.state, self.now())

    def stop_accepting(self) -> None:
        """Not ready, and no new requests, from here on; engines that end meanwhile wait for what is under way."""
        self.state.status.is_accepting = False
        for engine in self.state.engines.connected.values():
            self.state.outbox.message_to(engine).is_leaving = True
        self.state.status.mark_changed()
        self._act()

    def fail_all(self, make_error: Callable[[], RouterError]) -> None:
        """Ends what is left at shutdown."""
        for request in list(self.state.requests.live.values()):
            completion.fail(self.state, request, make_error(), self.now())
        self._act()

    # --- acting --------------------------------------------------------------------------------------------------

    def _report_usage(self, now: float) -> None:
        """Lets the other routers know what owners of API keys have used here."""
        state = self.state
        state.limiter.sweep(now)
        if not state.limiter.has_limits:
            return
        engines = state.engines.connected
        relays = [engines[engine_id] for engine_id in sorted(engines)]
        for engine, usage in state.usage_sharing.report(relays, now):
            state.outbox.message_to(engine).usage.CopyFrom(usage)

    def _forgive_lag(self, now: float) -> None:
        """A pause of our own must not look like silence of the engines."""
        if self._last_tick_s is not None:
            lag_s = now - self._last_tick_s
            if lag_s > MAX_TICK_LAG_S:
                for engine in self.state.engines.connected.values():
                    engine.last_heard_s = min(now, engine.last_heard_s + lag_s)
                    engine.progress_s = min(now, engine.progress_s + lag_s)
        self._last_tick_s = now

    def _act(self) -> None:
        """Carries out what the state asks for, until it asks for nothing more."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self._act_once()
            while self._late_cancels:
                request_id, reason = self._late_cancels.pop()
                request = self.state.requests.live.get(request_id)
                if request is not None:
                    completion.cancel(self.state, request, reason, self.now())
                self._act_once()
        finally:
            self._is_busy = False
        if self.state.status.version != self._seen_version:
            self._seen_version = self.state.status.version
            for listener in self._listeners:
                listener()

    def _act_once(self) -> None:
        actions = self.state.outbox.take()
        for engine, message in actions.messages:
            self.state.metrics.count("grpc_messages", "down")
            if self._engine_writer is not None:
                self._engine_writer.send(engine, message)
        if actions.flushes:
            self._flush(list(actions.flushes.values()))
        for response_stream, finish in actions.finishes:
            self._end(response_stream.on_finished, finish)
        for response_stream, error in actions.failures:
            self._end(response_stream.on_error, error)
        for taker, result in actions.claim_results:
            taker(result)
        for engine, reason in actions.closes:
            if self._engine_writer is not None:
                self._engine_writer.close(engine, reason)

    def _flush(self, requests: list[LiveRequest]) -> None:
        """Flushes response streams, each time beginning with another, so that no stream is always last."""
        now, state = self.now(), self.state
        self._rotation += 1
        start = self._rotation % len(requests)
        for request in requests[start:] + requests[:start]:
            try:
                request.response_stream.flush(now)
            except Exception:  # the outermost frame of a client's code: its fault must not reach other clients
                logger.exception("request %s: its answer cannot be written", request.request_id)
                state.metrics.count("sink_faults")
                self._late_cancels.append((request.request_id, "sink_fault"))

    def _end(self, method: Callable[[End], None], end: End) -> None:
        """Tells a response stream how its request ended."""
        try:
            method(end)
        except Exception:  # the outermost frame of a client's code; the request has ended anyway
            logger.exception("the end of an answer cannot be written")
            self.state.metrics.count("sink_faults")
