"""``RouterState``: all mutable state of a router, in parts by concern, and ``OWNERS``: which module may change what.

State changes only in synchronous functions of this package. They do no I/O: messages to engines and calls of response
streams gather in the ``RouterOutbox``, and ``router.Router`` carries them out once the state is consistent again.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.v1 import control_pb2, engine_pb2
from sluice_core.latency import LatencyModel
from sluice_core.records import EngineId, Plan, RequestId
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.fair_share import FairShare
from sluice_core.scheduling.prefix_index import PrefixIndex
from sluice_core.slo_attainment import AttainmentCounters
from sluice_core.strategies.interface import RouterPolicy
from sluice_router.errors import RouterError
from sluice_router.limit_type import Limits
from sluice_router.observability.decision_log import RING_SIZE, DecisionLog
from sluice_router.observability.metrics import RouterMetrics
from sluice_router.observability.request_traces import RequestTraces
from sluice_router.owner_limits.limiter import OwnerLimiter
from sluice_router.owner_limits.sharing import UsageSharing
from sluice_router.scheduling.entities import ConnectedEngine, EngineEndpoint, LiveRequest, PendingClaim, Submission
from sluice_router.scheduling.requests import ClaimTaker, Finish, FoundRequest, NewRequest, ResponseStream
from sluice_router.text.prompt_hashes import PrefixScheme


@dataclass(slots=True, kw_only=True)
class RequestQueues:
    """Every request that has not ended.

    Args:
        live: All of them.
        waiting: Of these, the ones without an engine, in order of arrival in the queue.
        awaiting_resume: Of the waiting ones, those that wait for the engine whose stream they lost.
        kept: Those whose prefill has ended and whose KV waits for an engine that decodes, first come first.
        deadlines: Heap of (deadline, request).
        last_assign_s: When placement last ran for all waiting requests.
        held_s: When requests were held last, because there was to be no engine until one came.
        by_resume_key: Of the live ones, those that their clients can resume.
        claims: What engines were asked for, by the key.
        detached: Of the live ones, those whose clients are gone and may come back: until when, in this order.
    """

    live: dict[RequestId, LiveRequest] = field(default_factory=dict)
    waiting: dict[RequestId, LiveRequest] = field(default_factory=dict)
    awaiting_resume: dict[RequestId, LiveRequest] = field(default_factory=dict)
    kept: dict[RequestId, LiveRequest] = field(default_factory=dict)
    deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    last_assign_s: float = float("-inf")
    held_s: float = float("-inf")
    by_resume_key: dict[bytes, LiveRequest] = field(default_factory=dict)
    claims: dict[bytes, PendingClaim] = field(default_factory=dict)
    detached: dict[RequestId, float] = field(default_factory=dict)

    def note_deadline(self, new: NewRequest) -> None:
        """Notes when a request's caller gives up, if ever."""
        if new.deadline_s is not None:
            heapq.heappush(self.deadlines, (new.deadline_s, new.request_id))

    def find(self, request_id: str) -> LiveRequest | None:
        """Finds a request by the router's id, or by the client's; for people, not for the token path."""
        known = self.live.get(RequestId(request_id))
        if known is not None:
            return known
        return next((item for item in self.live.values() if item.new.client_request_id == request_id), None)


@dataclass(slots=True, kw_only=True)
class EnginePool:
    """The engines.

    Args:
        connected: Streams by engine; lost ones are not in it.
        endpoints: Addresses of the discovery.
        table: What placement and flow policies see: engines that acknowledged the plan and are not refused.
        prefixes: What the engines have cached, by the scheme of their hashes: one, but while a cluster is upgraded.
    """

    table: EngineTable
    connected: dict[EngineId, ConnectedEngine] = field(default_factory=dict)
    endpoints: dict[str, EngineEndpoint] = field(default_factory=dict)
    prefixes: dict[PrefixScheme, PrefixIndex] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ActivePlan:
    """The plan in force, and what follows from it.

    Args:
        plan: The plan; None: none yet.
        policy: The router's policy of its strategy.
        model: Model that the engines agree on; empty: none yet.
        max_model_len_tokens: Longest prompt + output, the smallest over the engines; 0: no engine yet.
    """

    plan: Plan | None = None
    policy: RouterPolicy | None = None
    model: str = ""
    max_model_len_tokens: int = 0

    @property
    def is_holding(self) -> bool:
        """Whether there is to be no engine until a request comes, which is held until one serves."""
        plan = self.plan
        return plan is not None and plan.hold_s > 0.0 and all(part.is_draining for part in plan.engines.values())


@dataclass(slots=True, kw_only=True)
class RouterStatus:
    """What the router reports about itself.

    Args:
        is_accepting: False once the router shuts down.
        edge_fault: Why clients cannot be served, whatever the engines; empty: they can.
        version: Grows with every change worth reporting.
        num_reported: Requests that had arrived or finished at the last report of progress.
        reported_s: When that was.
    """

    is_accepting: bool = True
    edge_fault: str = ""
    version: int = 1
    num_reported: int = 0
    reported_s: float = 0.0

    def mark_changed(self) -> None:
        """Notes a change worth reporting."""
        self.version += 1


@dataclass(slots=True, kw_only=True)
class RequestStatistics:
    """Ended requests, as the control plane reads them.

    Args:
        attainment: Counters of met objectives, by SLO class.
        samples: The last requests, for the planner.
        last_arrival_s: Latest arrival of a sampled request.
        num_failed: Requests that failed; rejected, cancelled and wrong ones are not among them.
        num_arrived: Requests that asked for an engine, those that found the queue full included.
    """

    samples: deque[control_pb2.RequestSample] = field(default_factory=deque)
    attainment: AttainmentCounters = field(default_factory=AttainmentCounters)
    last_arrival_s: float | None = None
    num_failed: int = 0
    num_arrived: int = 0


@dataclass(slots=True, init=False)
class Actions:
    """What is left to do once the state is consistent again.

    Args:
        flushes: Requests whose response streams got tokens.
        finishes: Good ends.
        failures: Bad ends.
        messages: Messages to engines.
        closes: Streams to close, with the reason.
        claim_results: What claims found.
    """

    flushes: dict[RequestId, LiveRequest]
    finishes: list[tuple[ResponseStream, Finish]]
    failures: list[tuple[ResponseStream, RouterError]]
    messages: list[tuple[ConnectedEngine, engine_pb2.AttachRequest]]
    closes: list[tuple[ConnectedEngine, str]]
    claim_results: list[tuple[ClaimTaker, FoundRequest | RouterError]]

    def __init__(self) -> None:
        # Made for each event, and a dataclass's own is not compiled.
        self.flushes = {}
        self.finishes = []
        self.failures = []
        self.messages = []
        self.closes = []
        self.claim_results = []


@dataclass(slots=True, kw_only=True)
class RouterOutbox:
    """I/O that the state asks for.

    Args:
        actions: What gathers until the event is over.
        pending: Streams of engines with a message under way, or with slots that became free; lost ones too.
    """

    actions: Actions = field(default_factory=Actions)
    pending: dict[ConnectedEngine, None] = field(default_factory=dict)

    def message_to(self, engine: ConnectedEngine) -> engine_pb2.AttachRequest:
        """The message under way to an engine: sent at the end of the event, or dropped if the stream is lost then."""
        if engine.outgoing is None:
            engine.outgoing = engine_pb2.AttachRequest()
            self.pending[engine] = None
        return engine.outgoing

    def free_slot(self, submission: Submission) -> None:
        """Ends a submission; its slot is handed out again after the message under way.

        An engine carries out a message's submits before its aborts and releases: a slot reused in the same message
        would end the new request instead of the old one.
        """
        engine = submission.engine
        engine.slots[submission.slot] = None
        engine.cooling_slots.append(submission.slot)
        self.pending[engine] = None

    def take(self) -> Actions:
        """Hands over what is left to do; freed slots can be reused from here on."""
        actions, self.actions = self.actions, Actions()
        for engine in self.pending:
            if engine.outgoing is not None and not engine.is_lost:
                actions.messages.append((engine, engine.outgoing))
            engine.outgoing = None
            engine.reuse_cooled_slots()
        self.pending.clear()
        return actions


class RouterState:
    """All mutable state of a router.

    Args:
        router_id: Unique per router process.
        model_id: The control plane's id of the model that this router serves; empty: whichever the engines serve.
        limits: Bounds.
        rng: Makes ids, seeds and breaks ties; seeded by the caller.
        started_unix_s: Unix time, for ``/v1/models``.
        make_latency_model: Makes the latency model of a new engine; None: one that knows nothing yet.
        traces: Of requests; None: nobody collects them.

    Attributes:
        requests: Requests and their queues.
        engines: Engines and their addresses.
        active: The plan in force.
        outbox: I/O to do.
        status: Readiness, and the version that polls wait for.
        limiter: What owners of API keys have used of their limits.
        usage_sharing: Reports that to the other routers, and takes theirs.
        fair_share: What they have had of the engines, for whose turn it is.
        statistics: Ended requests.
        metrics: Counters and histograms; every module counts what it does.
        decision_log: Every decision about a request; every module records its own.
    """

    def __init__(
        self,
        *,
        router_id: str,
        limits: Limits,
        rng: random.Random,
        started_unix_s: int = 0,
        model_id: str = "",
        make_latency_model: Callable[[EngineId], LatencyModel] | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self.router_id = router_id
        self.model_id = model_id
        self.limits = limits
        self.rng = rng
        self.started_unix_s = started_unix_s
        self.requests = RequestQueues()
        self.engines = EnginePool(table=EngineTable(make_latency_model))
        self.active = ActivePlan()
        self.outbox = RouterOutbox()
        self.status = RouterStatus()
        self.limiter = OwnerLimiter()
        self.usage_sharing = UsageSharing(self.limiter)
        self.fair_share = FairShare()
        self.statistics = RequestStatistics()
        self.metrics = RouterMetrics()
        self.decision_log = DecisionLog(limits[RING_SIZE], traces)
        self.traces = traces

    def make_request_id(self) -> RequestId:
        """Makes the router's id of a request."""
        return RequestId(f"req-{self.rng.getrandbits(96):024x}")


# Which modules may change a field, and why there is more than one. A field that is not listed keeps its first value, or
# is counted by everybody (``RouterState.metrics``, ``decision_log``). ``router/tests/test_state_owners.py`` reads the
# code and fails when another module changes a field, or when a module listed here does not.
OWNERS: dict[str, tuple[str, str]] = {
    # RequestQueues: a request enters at admission, waits while no engine owns it, and leaves once.
    "live": ("admission completion resumption/adoption", "a request enters with its admission and leaves with its end"),
    "waiting": (
        "admission completion dispatch failover placement",
        "who gives a request an owner takes it out of the queue",
    ),
    "awaiting_resume": ("completion dispatch failover", "resumed, recovered elsewhere, or ended meanwhile"),
    "kept": ("moves/migration", ""),
    "deadlines": ("state wait_limits", "state adds, wait_limits takes those that have passed"),
    "new": ("resumption/adoption", "a caller that comes back has another deadline"),
    "by_resume_key": ("admission completion resumption/adoption", "as live"),
    "claims": ("resumption/claims", ""),
    "detached": (
        "completion resumption/adoption resumption/detachment",
        "until the client is back, or the request ends",
    ),
    "claim_results": ("resumption/claims", ""),
    "response_stream": ("resumption/adoption", "a client that resumes has another connection"),
    "last_assign_s": ("placement", ""),
    "held_s": ("wait_limits", ""),
    # EnginePool
    "connected": ("engines/engine_registry failover", "a stream begins in the registry and is lost in failover"),
    "endpoints": ("engines/engine_registry", ""),
    "table": (
        "completion engines/engine_messages failover model_match moves/migration placement plan token_delivery",
        "the view of the policies: whoever submits, cancels, grants or hears a report says so there",
    ),
    "prefixes": ("prefixes", ""),
    # EngineEndpoint
    "engine": ("engines/engine_registry", ""),
    # ActivePlan, and fields of the same name that hellos fix
    "plan": ("plan", ""),
    "policy": ("plan", ""),
    "model": ("model_match", ""),
    "max_model_len_tokens": ("model_match", ""),
    # RouterStatus
    "is_accepting": ("router", ""),
    "edge_fault": ("router", ""),
    "version": ("state", ""),
    "num_reported": ("status/control_status", ""),
    "reported_s": ("status/control_status", ""),
    # RequestStatistics
    "samples": ("planner_samples", ""),
    "attainment": ("completion", ""),
    "last_arrival_s": ("planner_samples", ""),
    "num_arrived": ("admission", ""),
    # RouterOutbox and Actions
    "actions": ("state", ""),
    "pending": ("state", ""),
    "flushes": (
        "completion resumption/adoption token_delivery",
        "tokens ask for a flush; an end carries what is left itself",
    ),
    "finishes": ("completion", ""),
    "failures": ("completion resumption/adoption", "the stream that a client left ends while its request goes on"),
    "messages": ("state", ""),
    "closes": ("failover", ""),
    # LiveRequest: who owns it
    "submission": (
        "completion dispatch failover moves/migration resumption/adoption token_delivery",
        "dispatch sets it; the others clear it when a request ends, its engine fails, hands off or finishes",
    ),
    "fence": ("dispatch", ""),
    "last_engine": ("dispatch", ""),
    # ConnectedEngine, RequestStatistics: each end counts once.
    "num_ended": ("completion", ""),
    "num_met_both": ("completion", ""),
    "num_failed": ("completion", ""),
    "pending_resume": ("dispatch failover", "failover waits for the engine; the next owner ends the wait"),
    "waiting_since_s": ("dispatch", ""),
    "wait_reason": ("dispatch placement", "the policy's reason; none yet when a request is queued again"),
    "predicted_ttft_s": ("dispatch placement", "the policy's estimate; none when a request is queued again"),
    "excluded": ("placement token_delivery", "an engine that returns a request is avoided until it is placed"),
    "prompt_hashes": ("placement prefixes", "made when a request is placed, and not kept after that"),
    # LiveRequest: its tokens
    "output_token_ids": ("resumption/adoption token_delivery", "tokens whose logprobs are lost are made once more"),
    "first_token_s": ("token_delivery", ""),
    "last_token_s": ("token_delivery", ""),
    "cached_tokens": ("token_delivery", ""),
    "lost_since_s": (
        "dispatch token_delivery",
        "a stall begins when the owner is lost and ends with a token or resume",
    ),
    # LiveRequest: what happened to it
    "migration": ("moves/migration", ""),
    "kept_kv": ("moves/migration", ""),
    "is_whole": ("moves/migration", ""),
    "copied_s": ("moves/copy_progress moves/migration", "from the grant on, and with each part"),
    "copies_due": ("moves/copy_progress", ""),
    "brought": ("moves/migration", ""),
    "route": ("moves/migration placement", "a placement plans the parts, and a move ends the first one"),
    "num_hand_offs": ("moves/migration", ""),
    "reset_at_tokens": ("moves/migration", ""),
    "moved_at_tokens": ("moves/migration", ""),
    "num_recoveries": (
        "failover moves/migration resumption/adoption",
        "a hand-off whose target is lost is a recovery too",
    ),
    "num_deaths": ("failover", ""),
    "died_on": ("failover", ""),
    # Submission and Migration
    "request": (
        "dispatch failover moves/migration resumption/adoption token_delivery",
        "cleared when the engine stops to own the request: aborted, lost, handed off, finished",
    ),
    "has_token": ("token_delivery", ""),
    "is_aborted": ("dispatch", ""),
    "is_pinned": ("dispatch moves/migration resumption/adoption", "a hand-off pins the KV; its release frees it"),
    "not_before_s": (
        "moves/drain moves/migration",
        "the next proposal of a draining engine's decode, and the next request for a kept prefill's room",
    ),
    "phase": ("moves/migration", ""),
    "submitted_s": ("moves/migration", ""),
    "offer_id": ("moves/kv_copies", ""),
    "num_parts": ("moves/kv_copies", ""),
    "num_sent_tokens": ("moves/kv_copies", ""),
    "num_copied_tokens": ("moves/copy_progress", ""),
    "target": ("moves/migration", ""),
    # ConnectedEngine: what it says
    "last_heard_s": ("engines/engine_messages router", "each message; the router adds its own pauses"),
    "progress_s": (
        "engines/engine_health engines/engine_messages router",
        "each report; an idle engine makes progress by being idle",
    ),
    "load": ("engines/engine_messages", ""),
    "num_iterations": ("engines/engine_messages", ""),
    "prefix_sequence": ("prefixes", ""),
    "last_fault": (
        "engines/engine_messages engines/engine_registry failover model_match plan",
        "for people: whoever finds a fault of an engine or its address says so",
    ),
    # ConnectedEngine: what it shall do
    "status": (
        "failover model_match moves/drain",
        "lost in failover, refused with its model, draining and drained by its reports",
    ),
    "role": ("plan", ""),
    "chunk_size_tokens": ("plan", ""),
    "acknowledged_generation": ("plan", ""),
    "is_draining": ("plan", ""),
    # ConnectedEngine: its stream
    "slots": ("dispatch entities state", "dispatch fills a slot, the outbox frees it"),
    "free_slots": ("entities", ""),
    "cooling_slots": ("entities state", "a freed slot cools until the message under way is sent"),
    "num_submits": ("dispatch", ""),
    "outgoing": ("state", ""),
    "num_grants": ("moves/migration", ""),
    "grants": ("moves/migration", ""),
    "num_offers": ("moves/kv_copies", ""),
    "offers": ("moves/kv_copies", ""),
    "pulled_offers": ("moves/kv_copies", ""),
    "migrations_out": ("moves/migration", ""),
    "migrations_in": ("moves/migration", ""),
}
