"""The records of the router's mutable state: live requests, engines' streams, submissions, migrations.

They refer to each other and change in place. ``state.OWNERS`` says which module may change which field.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from sluice.v1 import control_pb2, engine_pb2
from sluice_core.records import EngineId, Leg, MoveCause, RequestId, Role, Slo
from sluice_core.scheduling.engine_table import EngineConfig
from sluice_router.observability.metrics import EngineTraffic, Histogram
from sluice_router.owner_limits.limiter import Reservation
from sluice_router.scheduling.requests import ClaimTaker, NewRequest, ResponseStream
from sluice_router.text.prompt_hashes import PrefixScheme, PromptHashes


@dataclass(slots=True, eq=False, init=False)
class LiveRequest:
    """A request from admission to its end; mutable, changed only by the functions of the data plane.

    It is in ``RequestQueues.waiting``, in ``RequestQueues.kept``, or ``submission`` is set: its owner is that engine.
    In between it is only inside of one function, when its source has handed off and the target gets its submit.

    Args:
        request_id: The router's id.
        new: What the client API handed over, with the seed filled in.
        slo: Objectives, fixed at admission.
        priority: Higher goes first.
        response_stream: The client's answer.
        itl_s: Where the gaps between its tokens are counted.
        reservation: What it holds of the limits of its API key's owner.
        output_token_ids: Tokens delivered to the response stream so far.
        fence: Fencing number of the last submit.
        submission: Where it runs.
        last_engine: The engine that ran it last, on which its end counts.
        migration: The migration in progress.
        kept_kv: Where its KV waits for an engine that decodes, after a prefill; None: it does not.
        pending_resume: What the engine may have of it whose stream it lost; None from its next owner on.
        waiting_since_s: When it began to wait for an engine.
        wait_reason: Why it waits.
        first_token_s: When the first token came.
        last_token_s: When the last one came.
        lost_since_s: When its engine failed, until the next token comes.
        predicted_ttft_s: The placement's estimate.
        num_hand_offs: Moves that kept the KV.
        num_recoveries: Times it was placed again after a failure.
        num_deaths: Engines that failed while it ran there.
        died_on: Their ids; avoided while there are others.
        excluded: Engines that returned it; cleared once it is placed.
        cached_tokens: Prompt tokens found in a prefix cache.
        reset_at_tokens: Output length at the last move that reset Algorithm 1's length.
        moved_at_tokens: Output length at the last move.
        prompt_hashes: Hashes of its prompt, by the scheme of the engines, while it waits.
        route: Its parts, while the first one runs; empty: it is not split, or the next part runs.
        is_whole: Its prompt is not cut again: the engine of its second part had no room for it.
        is_adopted: Another router had it first.
        num_adopted_tokens: Output tokens that it had then.
    """

    request_id: RequestId
    new: NewRequest
    slo: Slo
    priority: int
    response_stream: ResponseStream
    itl_s: Histogram
    reservation: Reservation | None
    output_token_ids: array[int]
    fence: int
    submission: Submission | None
    last_engine: ConnectedEngine | None
    migration: Migration | None
    kept_kv: KeptKv | None
    pending_resume: PendingResume | None
    waiting_since_s: float
    wait_reason: str
    first_token_s: float | None
    last_token_s: float
    lost_since_s: float | None
    predicted_ttft_s: float | None
    num_hand_offs: int
    num_recoveries: int
    num_deaths: int
    died_on: set[EngineId]
    excluded: frozenset[EngineId]
    cached_tokens: int
    reset_at_tokens: int
    moved_at_tokens: int
    prompt_hashes: dict[PrefixScheme, PromptHashes]
    route: tuple[Leg, ...]
    is_whole: bool
    is_adopted: bool
    num_adopted_tokens: int

    # Made for each request, and a dataclass's own is not compiled.
    def __init__(
        self,
        *,
        request_id: RequestId,
        new: NewRequest,
        slo: Slo,
        priority: int,
        response_stream: ResponseStream,
        itl_s: Histogram,
        reservation: Reservation | None = None,
        output_token_ids: array[int] | None = None,
        fence: int = 0,
        waiting_since_s: float = 0.0,
        first_token_s: float | None = None,
        last_token_s: float = 0.0,
        lost_since_s: float | None = None,
        num_hand_offs: int = 0,
        num_recoveries: int = 0,
        cached_tokens: int = 0,
        reset_at_tokens: int = 0,
        is_adopted: bool = False,
        num_adopted_tokens: int = 0,
    ) -> None:
        self.request_id = request_id
        self.new = new
        self.slo = slo
        self.priority = priority
        self.response_stream = response_stream
        self.itl_s = itl_s
        self.reservation = reservation
        self.output_token_ids = array("I") if output_token_ids is None else output_token_ids
        self.fence = fence
        self.submission = self.last_engine = self.migration = self.kept_kv = self.pending_resume = None
        self.waiting_since_s = waiting_since_s
        self.wait_reason = ""
        self.first_token_s, self.last_token_s, self.lost_since_s = first_token_s, last_token_s, lost_since_s
        self.predicted_ttft_s = None
        self.num_hand_offs = num_hand_offs
        self.num_recoveries = num_recoveries
        self.num_deaths = 0
        self.died_on = set()
        self.excluded = frozenset()
        self.cached_tokens = cached_tokens
        self.reset_at_tokens = reset_at_tokens
        self.moved_at_tokens = 0
        self.prompt_hashes = {}
        self.route = ()
        self.is_whole = False
        self.is_adopted = is_adopted
        self.num_adopted_tokens = num_adopted_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.new.prompt_token_ids) + len(self.output_token_ids)

    @property
    def split_output_tokens(self) -> int:
        """Output tokens with which the part that runs is planned to end; 0: it is not."""
        return max(0, self.route[0].end_token - len(self.new.prompt_token_ids) + 1) if self.route else 0

    @property
    def split_prompt_tokens(self) -> int:
        """Prompt tokens with which the part that runs ends, where the prompt is cut; 0: it is not."""
        return self.route[0].end_token if self.route and not self.split_output_tokens else 0

    @property
    def next_token_due_s(self) -> float:
        """When the next token is due by the TPOT objective, on the router's clock; 0 before the first token."""
        if self.first_token_s is None:
            return 0.0
        return self.first_token_s + self.slo.tpot_s * len(self.output_token_ids)


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """A request's time on one engine, which is one slot of its stream.

    Args:
        engine: The engine.
        slot: Index in the engine's stream table.
        request: The request that the engine owns; None once it does not (aborted, handed off): its tokens are dropped.
        request_id: The request's id, for as long as the slot is taken.
        submit_number: Number of its submit on the stream.
        has_token: A token came from this submission.
        is_aborted: An abort was sent.
        is_pinned: It was handed off; the engine keeps its KV until the slot is released.
        not_before_s: Earliest time of the router's next own proposal to move it.
    """

    engine: ConnectedEngine
    slot: int
    request: LiveRequest | None
    request_id: RequestId
    submit_number: int
    has_token: bool = False
    is_aborted: bool = False
    is_pinned: bool = False
    not_before_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class KeptKv:
    """KV of a finished prefill that its engine keeps until an engine with room pulls it.

    Args:
        source: The submission that ended; its slot is released when the KV is no longer needed.
        kv: The handle.
        until_s: When the wait ends.
        not_before_s: When room may be asked for again.
    """

    source: Submission
    kv: engine_pb2.KvHandle
    until_s: float
    not_before_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class PendingResume:
    """What an engine may still have of a request, because only the stream to it broke.

    Args:
        submission: The submission that the stream's end cut off.
        reason: Why the stream was lost.
        until_s: Until when the request waits for that engine alone; later any may take it.
    """

    submission: Submission
    reason: str
    until_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class PendingClaim:
    """A request that engines were asked for.

    Args:
        taker: Gets what was found.
        until_s: When the wait ends.
        awaited: Engines that have not answered.
        answers: Of the engines that know it.
        has_lost_engine: An engine's stream ended before its answer came.
    """

    taker: ClaimTaker
    until_s: float
    awaited: set[EngineId] = field(default_factory=set)
    answers: list[tuple[ConnectedEngine, engine_pb2.ClaimAnswer]] = field(default_factory=list)
    has_lost_engine: bool = False


class MigrationPhase(IntEnum):
    """Phases of a migration."""

    GRANT_ASKED = 1
    COPYING = 2
    HANDING_OFF = 3
    SUBMITTED = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Migration:
    """A migration in progress; ``migration`` has a picture of its phases.

    Args:
        request: What moves.
        cause: Why.
        source: The submission that ends; its slot is released when the target has the first token.
        target: The engine asked for room; None once it is lost, so that the request will recover elsewhere.
        grant_id: Id of the grant on the target's stream.
        started_s: When the grant was asked for.
        phase: Where it stands.
        offer_id: Id of the offer that was asked for and not passed on yet, on the source's stream; 0: none.
        num_parts: Parts that the target was told to pull.
        num_sent_tokens: Tokens of them that it knows.
        num_copied_tokens: Tokens from the request's first one on whose KV it has.
        submitted_s: When the request was submitted to the target.
        is_cut: The source computes the first part of the prompt, and ends there by itself.
        copied_s: When the last part came.
    """

    request: LiveRequest
    cause: MoveCause
    source: Submission
    target: ConnectedEngine | None
    grant_id: int
    started_s: float
    phase: MigrationPhase = MigrationPhase.GRANT_ASKED
    offer_id: int = 0
    num_parts: int = 0
    num_sent_tokens: int = 0
    num_copied_tokens: int = 0
    submitted_s: float = 0.0
    is_cut: bool = False
    copied_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectedEngine:
    """One stream to one engine, from its hello to its loss. A reconnect makes a new one.

    Args:
        engine_id: Pod uid, or the launcher's name.
        epoch: Different after every start of the engine.
        address: host:port.
        model: Model and revision, which a stream never changes.
        fingerprint: Of its KV; KV moves between equal ones only.
        model_id: The control plane's id of the model; empty: it was not told.
        spec: Its sizes.
        max_model_len_tokens: Longest prompt + output.
        last_heard_s: When the last message came.
        progress_s: When it last made progress, or had nothing to do.
        status: How the stream stands.
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
        grants: Migrations to this engine whose grant is asked for or not used yet, by grant id.
        pulls_parts: It offers KV of running requests, and pulls it in parts.
        resume_timeout_s: How long it keeps requests that their clients may resume.
        num_offers: Offers of KV asked for so far.
        offers: Migrations from here whose offer is asked for, by offer id.
        pulled_offers: Source and offer of the parts that are pulled here, by grant id.
        copies_due: Cut prompts from here whose next blocks are asked for when this engine has made an iteration.
        brought: Cut prompts submitted here that may still read the KV of their first part, by grant id.
        migrations_out: Migrations in flight from here.
        migrations_in: Migrations in flight to here.
        num_ended: Requests that finished or failed here.
        num_met_both: Of these, met both objectives.
        num_failed: Of these, failed.
        outgoing: Message under way.
        last_fault: For people.
        prefix_scheme: How it hashes prompts; None: it reports no prefixes.
        prefix_sequence: Number of the last report of its prefix cache.
    """

    engine_id: EngineId
    epoch: int
    address: str
    model: str
    fingerprint: str
    spec: EngineConfig
    max_model_len_tokens: int
    resume_timeout_s: float = 0.0
    last_heard_s: float
    progress_s: float
    status: control_pb2.EngineState.ValueType = control_pb2.ENGINE_STATE_READY
    role: Role | None = None
    chunk_size_tokens: int = 0
    acknowledged_generation: int = 0
    is_draining: bool = False
    load: engine_pb2.LoadReport = field(default_factory=engine_pb2.LoadReport)
    num_iterations: int = 0
    slots: list[Submission | None] = field(default_factory=list)
    free_slots: deque[int] = field(default_factory=deque)
    cooling_slots: list[int] = field(default_factory=list)
    num_submits: int = 0
    num_grants: int = 0
    grants: dict[int, Migration] = field(default_factory=dict)
    pulls_parts: bool = False
    num_offers: int = 0
    offers: dict[int, Migration] = field(default_factory=dict)
    pulled_offers: dict[int, tuple[ConnectedEngine, int]] = field(default_factory=dict)
    copies_due: list[Migration] = field(default_factory=list)
    brought: dict[int, Migration] = field(default_factory=dict)
    migrations_out: int = 0
    migrations_in: int = 0
    num_ended: int = 0
    num_met_both: int = 0
    num_failed: int = 0
    outgoing: engine_pb2.AttachRequest | None = None
    last_fault: str = ""
    prefix_scheme: PrefixScheme | None = None
    prefix_sequence: int = 0
    model_id: str = ""

    def serves_other_model(self, model_id: str) -> bool:
        """Whether its model is another one than a router's; of one that was told no id, only its files say so."""
        return bool(model_id and self.model_id and self.model_id != model_id)

    @property
    def is_lost(self) -> bool:
        """The stream is over."""
        return self.status == control_pb2.ENGINE_STATE_LOST

    @property
    def num_taken_slots(self) -> int:
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
class EngineEndpoint:
    """An address of the discovery, and what is known of the engine behind it.

    Args:
        engine: The stream, present or last.
        last_fault: Why there is none.
        traffic: What went over its streams.
    """

    engine: ConnectedEngine | None = None
    last_fault: str = ""
    traffic: EngineTraffic = field(default_factory=EngineTraffic)
