"""The one class that owns the router's mutable state, and the records in it.

The state changes only in synchronous functions, grouped by what they are about: ``ending`` (finish, fail, cancel),
``placing`` (admit, assign, submit), ``delivery`` (what an engine's message brings), ``moves``, ``recovery``, ``plan``. Each
takes the state and ``now``. They do no I/O: messages to engines gather in ``Engine.outgoing``, calls of sinks in
``RouterState.actions``; ``router.Router`` carries both out when the state is consistent again.

Slots. A link's stream table is a list of stays, indexed by slot. A slot that became free is reused only in a later message
than the one under way: an engine carries out a message's submits before its aborts and releases.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from sluice.v1 import control_pb2, engine_pb2
from sluice_core.records import RequestId
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.slo import AttainmentCounters
from sluice_router.observability.decision_log import DecisionRing
from sluice_router.observability.metrics import LinkTraffic, Metrics

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from sluice_core.latency import LatencyModel
    from sluice_core.records import EngineId, MoveCause, Plan, Role
    from sluice_core.scheduling.decode_flow import FlowPolicy
    from sluice_core.scheduling.engine_table import EngineConfig
    from sluice_core.scheduling.placement import PlacementPolicy
    from sluice_router.errors import RouterError
    from sluice_router.scheduling.requests import Finish, LiveRequest, ResponseSink
    from sluice_router.settings import Limits


class StreamBrokenError(Exception):
    """An engine broke the protocol (a gap, an unknown slot, ...): its stream is given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """A request's time on one engine, which is one slot of its stream.

    Args:
        engine: The engine.
        slot: Index in the engine's stream table.
        request: The request that the engine owns; None once it does not (aborted, handed off): its tokens are dropped.
        request_id: The request's id, for as long as the slot is taken.
        submit_number: Number of its submit on the stream.
        has_token: A token came from this stay.
        is_aborted: An abort was sent.
        is_pinned: It was handed off; the engine keeps its KV until the slot is released.
        not_before_s: Earliest time of the router's next own proposal to move it.
    """

    engine: Engine
    slot: int
    request: LiveRequest | None
    request_id: RequestId
    submit_number: int
    has_token: bool = False
    is_aborted: bool = False
    is_pinned: bool = False
    not_before_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Hold:
    """What an engine may still have of a request, because only the stream to it broke.

    Args:
        stay: The stay that the stream's end cut off.
        reason: Why the stream was lost.
        until_s: Until when the request waits for that engine alone; later any may take it, and this one while none has.
    """

    stay: Stay
    reason: str
    until_s: float


class MovePhase(IntEnum):
    """Steps of a move."""

    GRANT_ASKED = 1
    HANDING_OFF = 2
    SUBMITTED = 3


@dataclass(slots=True, kw_only=True, eq=False)
class Move:
    """A move in progress (architecture.md 4.3).

    Args:
        request: What moves.
        cause: Why.
        source: The stay that ends; its slot is released when the target has the first token.
        target: The engine asked for room; None once it is lost, so that the request will recover elsewhere.
        grant_id: Id of the grant on the target's stream.
        started_s: When the grant was asked for.
        phase: Where it stands.
        submitted_s: When the target was told to pull.
    """

    request: LiveRequest
    cause: MoveCause
    source: Stay
    target: Engine | None
    grant_id: int
    started_s: float
    phase: MovePhase = MovePhase.GRANT_ASKED
    submitted_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Engine:
    """One stream to one engine, from its hello to its loss. A reconnect makes a new one.

    Args:
        engine_id: Pod uid, or the launcher's name.
        epoch: Different after every start of the engine.
        address: host:port.
        model: Model and revision, which a stream never changes.
        fingerprint: Of its KV; KV moves between equal ones only.
        spec: What it is.
        max_model_len_tokens: Longest prompt + output.
        last_heard_s: When the last message came.
        progress_s: When it last made progress, or had nothing to do.
        status: How the link stands.
        role: Role in force; None before the first acknowledgement.
        chunk_size_tokens: Chunk size in force.
        acknowledged_generation: Plan generation in force.
        is_draining: By the plan, or by its own report.
        load: Last report.
        num_iterations: Number of the last iteration.
        slots: Stream table.
        free_slots: Slots to hand out, least recently used first.
        cooling_slots: Slots that became free since the last message was taken.
        num_submits: Submits so far.
        num_grants: Grant requests so far.
        grants: Moves to this engine whose grant is asked for or not used yet, by grant id.
        moves_out: Moves in flight from here.
        moves_in: Moves in flight to here.
        outgoing: Message under way.
        last_fault: For people.
    """

    engine_id: EngineId
    epoch: int
    address: str
    model: str
    fingerprint: str
    spec: EngineConfig
    max_model_len_tokens: int
    last_heard_s: float
    progress_s: float
    status: control_pb2.EngineState.ValueType = control_pb2.ENGINE_STATE_READY
    role: Role | None = None
    chunk_size_tokens: int = 0
    acknowledged_generation: int = 0
    is_draining: bool = False
    load: engine_pb2.LoadReport = field(default_factory=engine_pb2.LoadReport)
    num_iterations: int = 0
    slots: list[Stay | None] = field(default_factory=list)
    free_slots: deque[int] = field(default_factory=deque)
    cooling_slots: list[int] = field(default_factory=list)
    num_submits: int = 0
    num_grants: int = 0
    grants: dict[int, Move] = field(default_factory=dict)
    moves_out: int = 0
    moves_in: int = 0
    outgoing: engine_pb2.AttachRequest | None = None
    last_fault: str = ""

    @property
    def is_lost(self) -> bool:
        """The stream is over."""
        return self.status == control_pb2.ENGINE_STATE_LOST

    @property
    def num_stays(self) -> int:
        """Slots taken."""
        return len(self.slots) - len(self.free_slots) - len(self.cooling_slots)

    def take_slot(self) -> int:
        """Hands out a slot."""
        if self.free_slots:
            return self.free_slots.popleft()
        self.slots.append(None)
        return len(self.slots) - 1

    def reuse_cooled_slots(self) -> None:
        """Lets the slots that became free before the next message be handed out in it."""
        self.free_slots.extend(self.cooling_slots)
        self.cooling_slots.clear()


@dataclass(slots=True, kw_only=True)
class Actions:
    """What is left to do once the state is consistent again.

    Args:
        flushes: Sinks that got tokens, by request.
        finishes: Good ends.
        failures: Bad ends.
        messages: Messages to engines.
        closes: Streams to close, with the reason.
    """

    flushes: dict[RequestId, LiveRequest] = field(default_factory=dict)
    finishes: list[tuple[ResponseSink, Finish]] = field(default_factory=list)
    failures: list[tuple[ResponseSink, RouterError]] = field(default_factory=list)
    messages: list[tuple[Engine, engine_pb2.AttachRequest]] = field(default_factory=list)
    closes: list[tuple[Engine, str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class LinkStatus:
    """What is known of an address of the discovery, for status pages.

    Args:
        state: How its link stands.
        engine: The stream, present or last.
        last_fault: Why there is none.
        traffic: What went over its streams.
    """

    state: control_pb2.EngineState.ValueType = control_pb2.ENGINE_STATE_CONNECTING
    engine: Engine | None = None
    last_fault: str = ""
    traffic: LinkTraffic = field(default_factory=LinkTraffic)


class RouterState:
    """All mutable state of a router.

    Args:
        router_id: Unique per router process.
        limits: Bounds.
        rng: Makes ids, seeds and breaks ties; seeded by the caller.
        started_unix_s: Unix time, for ``/v1/models``.
        make_latency_model: Makes the latency model of a new engine; None: one that knows nothing yet.

    Attributes:
        engines: Streams by engine; lost ones are not in it.
        links: Addresses of the discovery.
        table: What placement and flow see: acknowledged engines that are not refused.
        requests: Every request that has not ended.
        waiting: Of these, the ones without an engine, in order of arrival in the queue.
        held: Of these, the ones that wait for the engine whose stream they lost.
        plan: Plan in force.
        placement: Placement policy of its strategy.
        flow: Flow policy of its strategy.
        model: Model that the engines agree on; empty: none yet.
        edge_fault: Why clients cannot be served, whatever the engines; empty: they can.
        dirty: Engines with a message under way, or with slots that became free.
        last_assign_s: When all waiting requests were last looked at.
        deadlines: Heap of (deadline, request).
        version: Grows with every change worth reporting.
    """

    def __init__(
        self,
        *,
        router_id: str,
        limits: Limits,
        rng: random.Random,
        started_unix_s: int = 0,
        make_latency_model: Callable[[EngineId], LatencyModel] | None = None,
    ) -> None:
        self.router_id = router_id
        self.limits = limits
        self.rng = rng
        self.started_unix_s = started_unix_s
        self.engines: dict[EngineId, Engine] = {}
        self.links: dict[str, LinkStatus] = {}
        self.table = EngineTable(make_latency_model)
        self.requests: dict[RequestId, LiveRequest] = {}
        self.waiting: dict[RequestId, LiveRequest] = {}
        self.held: dict[RequestId, LiveRequest] = {}
        self.deadlines: list[tuple[float, RequestId]] = []
        self.plan: Plan | None = None
        self.placement: PlacementPolicy | None = None
        self.flow: FlowPolicy | None = None
        self.model = ""
        self.max_model_len_tokens = 0
        self.is_accepting = True
        self.edge_fault = ""
        self.dirty: dict[EngineId, Engine] = {}
        self.actions = Actions()
        self.rotation = 0
        self.last_assign_s = float("-inf")
        self.last_arrival_s: float | None = None
        self.version = 1
        self.num_reported = 0
        self.reported_s = 0.0
        self.metrics = Metrics()
        self.attainment = AttainmentCounters()
        self.ring = DecisionRing(limits.ring_size)
        self.samples: deque[control_pb2.RequestSample] = deque(maxlen=limits.num_samples)

    def message_to(self, engine: Engine) -> engine_pb2.AttachRequest:
        """The message under way to an engine; whatever is put into it is sent at the end of the event."""
        if engine.outgoing is None:
            engine.outgoing = engine_pb2.AttachRequest()
            self.dirty[engine.engine_id] = engine
        return engine.outgoing

    def free_slot(self, stay: Stay) -> None:
        """Ends a stay; its slot is handed out again after the message under way."""
        engine = stay.engine
        engine.slots[stay.slot] = None
        engine.cooling_slots.append(stay.slot)
        self.dirty[engine.engine_id] = engine

    def find_request(self, request_id: str) -> LiveRequest | None:
        """Finds a request by the router's id, or by the client's; for people, not for the token path."""
        known = self.requests.get(RequestId(request_id))
        if known is not None:
            return known
        return next((item for item in self.requests.values() if item.new.client_request_id == request_id), None)

    def touch(self) -> None:
        """Notes a change worth reporting."""
        self.version += 1

    def take_actions(self) -> Actions:
        """Hands over what is left to do; freed slots can be reused from here on."""
        actions, self.actions = self.actions, Actions()
        for engine in self.dirty.values():
            if engine.outgoing is not None and not engine.is_lost:
                actions.messages.append((engine, engine.outgoing))
            engine.outgoing = None
            engine.reuse_cooled_slots()
        self.dirty.clear()
        return actions
