"""The engines as one router knows them: reports plus its own placements since."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.latency import (
    DEFAULT_TRANSFER_BYTES_PER_S,
    TRANSFER_LATENCY_S,
    LatencyModel,
    OnlineLatencyModel,
)
from sluice_core.records import EngineId, IterationShape, RequestId, Role
from sluice_core.router_shares import SHARE_MARGIN_TOKENS
from sluice_core.scheduling.engine_state import (
    EngineConfig,
    EngineLoad,
    EngineState,
    EngineView,
    Entry,
    InFlight,
    Passable,
    count_placement,
)
from sluice_core.scheduling.iteration_limits import IterationLimits, count_fitting_decodes, fit_prefill_budget

__all__ = [
    "PROVEN_OBSERVATIONS",
    "RECOVERY_BURST_S",
    "RECOVERY_SHARE",
    "EngineConfig",
    "EngineState",
    "EngineTable",
    "EngineView",
    "Entry",
]

PROVEN_OBSERVATIONS: Final = 100  # with fewer fitted iterations an estimate justifies no rejection
RECOVERY_SHARE: Final = 0.5  # of an engine's prefill time, while other prefills wait there
RECOVERY_BURST_S: Final = 0.5  # recovery work that an engine takes ahead of that share
_LEAST_SEATS_SHARE: Final = 1 / 16  # of max_num_seqs: an engine has these seats however little time decodes may take
_RATE_GAIN: Final = 0.2  # weight of the newest pull rate in the running mean


# Engines that can take a prefill stand in ``order``: immutable ``Entry`` tuples, ascending by queued prefill tokens
# (other routers' engines ``SHARE_MARGIN_TOKENS`` later), P-heavy first among equals. An entry is replaced, never
# changed, so a decision record is a copy of pointers. Engines that can take none stand in ``blocked``, with the reason.
#
# Invariants: every engine is in exactly one of the two; ``queued_prefill_tokens``, ``free_at_s`` and
# ``reserved_kv_blocks`` are the last report's plus those of ``in_flight``, the own placements that it does not include.
#
# Reports come far more often than requests, so what follows from them is computed when it is read: a changed engine is
# *stale* until then. ``order``, ``blocked`` and states are read up to date; ``peek`` and ``list_loads`` spare the work
# for callers that need loads and settings only.
class EngineTable:
    """All engines that this router may use; its methods are the only writers of their state.

    Args:
        make_latency_model: Makes the model of a new engine; None: an ``OnlineLatencyModel`` that knows nothing yet.
        counts_decodes: See ``ChunkedPrefillPolicy``.

    Attributes:
        pull_bytes_per_s: Running mean of the measured KV pull rates; 0 before any.
        num_of_others: Engines of other routers' shares; as ``order``, up to date once that was read.
    """

    def __init__(
        self, make_latency_model: Callable[[EngineId], LatencyModel] | None = None, *, counts_decodes: bool = True
    ) -> None:
        self._counts_decodes = counts_decodes
        self.pull_bytes_per_s = 0.0
        self.num_of_others = 0
        self._order: list[Entry] = []
        self._blocked: dict[EngineId, EngineView] = {}
        self._stale: dict[EngineId, EngineState] = {}
        self._make_latency_model = make_latency_model
        self._states: dict[EngineId, EngineState] = {}
        self._num_added = 0
        self._has_uniform_chunk_size = True
        self._limits = IterationLimits()
        self._prefill_per_decode = 0.0
        self._separates_phases = False

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, engine_id: EngineId) -> bool:
        return engine_id in self._states

    def __iter__(self) -> Iterator[EngineState]:
        self._refresh_stale()
        return iter(self._states.values())

    def __getitem__(self, engine_id: EngineId) -> EngineState:
        if engine_id in self._stale:
            self._refresh(self._states[engine_id])
        return self._states[engine_id]

    def get(self, engine_id: EngineId) -> EngineState | None:
        """Return an engine, or None when the table does not have it."""
        return self[engine_id] if engine_id in self._states else None

    def peek(self, engine_id: EngineId) -> EngineState | None:
        """Return an engine whose load and settings are up to date, but maybe not what follows from them."""
        return self._states.get(engine_id)

    def list_loads(self) -> Collection[EngineState]:
        """List the engines, of each its load and settings up to date, but maybe not what follows from them."""
        return self._states.values()

    @property
    def order(self) -> list[Entry]:
        """Engines that can take a prefill, sorted; read only."""
        if self._stale:
            self._refresh_stale()
        return self._order

    @property
    def blocked(self) -> dict[EngineId, EngineView]:
        """Engines that can take none; read only."""
        if self._stale:
            self._refresh_stale()
        return self._blocked

    @property
    def has_uniform_chunk_size(self) -> bool:
        """True when all engines that do not drain have one chunk size: no transfer, no flow."""
        return self._has_uniform_chunk_size

    def limit_iterations(self, limits: IterationLimits, *, prefill_per_decode: float = 0.0) -> None:
        """Set how long iterations take at most: engines have prefill budgets and seats accordingly.

        Args:
            limits: For each engine at once.
            prefill_per_decode: Prefill tokens that decodes bring, for each token of theirs. It shifts slowly, and
                counts from an engine's next report on.
        """
        self._prefill_per_decode = prefill_per_decode
        if limits != self._limits:
            self._limits = limits
            self._stale.update(self._states)

    def separate_phases(self, *, separates: bool) -> None:
        """Set whether engines withhold decodes while they compute prefills, which then have iterations of their own."""
        if separates != self._separates_phases:
            self._separates_phases = separates
            self._stale.update(self._states)

    def add(self, engine_id: EngineId, config: EngineConfig, *, role: Role, chunk_size_tokens: int) -> None:
        """Add an engine; it takes placements from its first report on.

        Raises:
            ValueError: It is in the table already.
        """
        if engine_id in self._states:
            raise ValueError(f"engine {engine_id!r} is in the table already")
        self._num_added += 1
        state = EngineState(
            engine_id=engine_id,
            config=config,
            number=self._num_added,
            latency=OnlineLatencyModel() if self._make_latency_model is None else self._make_latency_model(engine_id),
            role=role,
            chunk_size_tokens=chunk_size_tokens,
        )
        self._states[engine_id] = state
        self._stale[engine_id] = state
        self._check_roles()

    def remove(self, engine_id: EngineId) -> None:
        """Forget an engine and everything placed on it. Unknown ones are ignored."""
        state = self._states.pop(engine_id, None)
        if state is not None:
            self._stale.pop(engine_id, None)
            self._remove_view(state)
            self._check_roles()

    def configure(self, engine_id: EngineId, *, role: Role, chunk_size_tokens: int, is_draining: bool = False) -> None:
        """Put an acknowledged role, chunk size and drain flag in force."""
        state = self._states[engine_id]
        state.role, state.chunk_size_tokens, state.is_draining = role, chunk_size_tokens, is_draining
        self._stale[engine_id] = state
        self._check_roles()

    def report(self, engine_id: EngineId, load: EngineLoad, now: float) -> None:
        """Take a load report: drops the placements it includes, adds the rest to its sums.

        Args:
            engine_id: Who reports.
            load: The report.
            now: When it was received, in seconds.
        """
        state = self._states[engine_id]
        state.load, state.reported_at_s = load, now
        if state.in_flight:
            last = load.last_submit_number
            included = [
                request_id
                for request_id, placement in state.in_flight.items()
                if placement.submit_number is not None and placement.submit_number <= last
            ]
            for request_id in included:
                del state.in_flight[request_id]
        if load.pull_bytes_per_s > 0:
            gain = _RATE_GAIN if self.pull_bytes_per_s else 1.0
            self.pull_bytes_per_s += gain * (load.pull_bytes_per_s - self.pull_bytes_per_s)
        self._stale[engine_id] = state

    def observe_iteration(self, engine_id: EngineId, shape: IterationShape, duration_s: float) -> None:
        """Fit the engine's latency model to a measured iteration; call it before the ``report`` of the same message."""
        self._states[engine_id].latency.observe(shape, duration_s)

    def record_placement(
        self,
        engine_id: EngineId,
        request_id: RequestId,
        now: float,
        *,
        tokens: int,
        kv_tokens: int,
        execute_s: float,
        is_recovery: bool,
        passable: Passable | None = None,
    ) -> None:
        """Count a prefill that was just placed; placement policies call it themselves.

        Args:
            engine_id: Where it goes.
            request_id: The request.
            now: Seconds on the caller's clock.
            tokens: Prompt tokens to compute there, expected prefix-cache hits left out.
            kv_tokens: Tokens that its KV cache will hold.
            execute_s: E, in seconds.
            is_recovery: Counts against the cap on recoveries.
            passable: How prompts see it that pass it there; None: none does.
        """
        state = self._states[engine_id]
        blocks = blocks_for_tokens(kv_tokens, state.config.block_size_tokens)
        state.in_flight[request_id] = InFlight(
            placed_at_s=now, tokens=tokens, execute_s=execute_s, blocks=blocks, passable=passable
        )
        if is_recovery:
            state.recovery_free_at_s = max(now, state.recovery_free_at_s) + execute_s / RECOVERY_SHARE
        if engine_id in self._stale:
            return
        state.queued_prefill_tokens += tokens
        state.free_at_s = max(now, state.free_at_s) + execute_s
        state.reserved_kv_blocks += blocks
        view = state.view
        assert view is not None
        later = view.later if passable is None else (*view.later, passable)
        self._publish_view(state, count_placement(view, state, blocks, later))

    def mark_submitted(self, engine_id: EngineId, request_id: RequestId, submit_number: int) -> None:
        """Note under which number a placement was sent; a report that includes the number drops it.

        Raises:
            ValueError: No such placement.
        """
        state = self._states.get(engine_id)
        placement = state.in_flight.get(request_id) if state else None
        if placement is None:
            raise ValueError(f"no placement of request {request_id!r} on engine {engine_id!r} to mark as submitted")
        placement.submit_number = submit_number

    def cancel_placement(
        self,
        engine_id: EngineId,
        request_id: RequestId,
        now: float,  # noqa: ARG002 - see Args
    ) -> None:
        """Forget a placement that was not sent, or was aborted before a report included it. Unknown ones are ignored.

        Args:
            engine_id: Where it was placed.
            request_id: The request.
            now: Seconds on the caller's clock, as for every event; the estimate is rebuilt from the last report.
        """
        state = self._states.get(engine_id)
        if state is not None and state.in_flight.pop(request_id, None) is not None:
            self._stale[engine_id] = state

    def record_grant_request(self, engine_id: EngineId, grant_id: int, num_blocks: int) -> None:
        """Count blocks asked for on a target until its answer, so that moves of one tick spread."""
        state = self._states[engine_id]
        state.pending_grants[grant_id] = num_blocks
        self._stale[engine_id] = state

    def record_grant_answer(self, engine_id: EngineId, grant_id: int) -> None:
        """Stop counting: granted blocks are in the target's reports from now on. Unknown ones are ignored."""
        state = self._states.get(engine_id)
        if state is not None and state.pending_grants.pop(grant_id, None) is not None:
            self._stale[engine_id] = state

    def _check_roles(self) -> None:
        """Recompute whether chunk sizes differ; a change alters the rank and the transfer time of every engine."""
        chunk_sizes = {state.chunk_size_tokens for state in self._states.values() if not state.is_draining}
        has_uniform_chunk_size = len(chunk_sizes) <= 1
        if has_uniform_chunk_size != self._has_uniform_chunk_size:
            self._has_uniform_chunk_size = has_uniform_chunk_size
            self._stale.update(self._states)

    def _refresh_stale(self) -> None:
        """Bring all stale engines up to date."""
        for state in list(self._stale.values()):
            self._refresh(state)

    def _refresh(self, state: EngineState) -> None:
        """Recompute what follows from the last report, the settings and the placements in flight."""
        self._stale.pop(state.engine_id, None)
        load, placements = state.load, state.in_flight.values()
        num_decodes, context_tokens = self._find_decodes_beside(state)
        num_counted = num_decodes if self._counts_decodes else 0
        state.room_tokens = max(0, min(state.chunk_size_tokens, state.config.max_batch_tokens) - num_counted)
        limits = self._limits
        if limits.alone_tokens and not num_decodes:
            state.room_tokens = min(state.room_tokens, limits.alone_tokens)
        elif limits.iteration_s < math.inf:
            fitting = fit_prefill_budget(
                state.latency,
                limits.iteration_s,
                state.room_tokens,
                num_decodes,
                context_tokens,
                least_prefill_s=limits.least_prefill_s,
            )
            # Without decodes the chunk size alone limits an iteration: prompts do not wait for ever for an engine
            # that is fast enough.
            if fitting.tokens or num_decodes:
                state.room_tokens = fitting.tokens
        state.late_s = self._estimate_queue_s(
            state, load.late_prefill_tokens, load.late_attention_work, load.late_requests
        )
        # Prompts that go last take blocks and seats when nobody else wants them.
        timely_tokens = load.queued_prefill_tokens - load.late_prefill_tokens
        queue_s = self._estimate_queue_s(
            state,
            timely_tokens,
            max(0.0, load.queued_attention_work - load.late_attention_work),
            load.timely_requests,
        )
        reported_at_s = state.reported_at_s or 0.0
        queued_blocks = blocks_for_tokens(timely_tokens, state.config.block_size_tokens)
        state.queued_prefill_tokens = load.queued_prefill_tokens
        state.free_at_s = reported_at_s + load.iteration_remaining_s + queue_s
        # Each queued prompt ends in a partly filled block of its own.
        state.reserved_kv_blocks = queued_blocks + max(0, load.timely_requests - 1)
        for placement in placements:
            state.queued_prefill_tokens += placement.tokens
            state.free_at_s = max(placement.placed_at_s, state.free_at_s) + placement.execute_s
            state.reserved_kv_blocks += placement.blocks
        self._publish_view(state, self._make_view(state, queue_s / max(1, timely_tokens)))

    def _estimate_queue_s(self, state: EngineState, tokens: int, attention_work: float, num_prompts: int) -> float:
        """Estimate how long reported prompts take beside the decodes."""
        if tokens <= 0:
            return 0.0
        num_decodes, context_tokens = self._find_decodes_beside(state)
        return state.latency.estimate_prefill_s(
            tokens=tokens,
            attention_work=attention_work,
            num_prompts=num_prompts,
            room_tokens=state.room_tokens,
            num_decodes=num_decodes,
            decode_context_tokens=context_tokens,
        )

    def _list_later(self, state: EngineState, token_s: float) -> tuple[Passable, ...]:
        """List the queued prompts that others may pass; those that are reported take ``token_s`` per token."""
        later = [(due.due_s, due.allowed_s, due.tokens * token_s) for due in state.load.due]
        later += [each.passable for each in state.in_flight.values() if each.passable is not None]
        return tuple(later)

    def _make_view(self, state: EngineState, queued_token_s: float) -> EngineView:
        """Gather what a placement needs to know of an engine; ``queued_token_s`` is what a queued token takes."""
        load = state.load
        transfers = not self._has_uniform_chunk_size and state.role is Role.PREFILL_HEAVY
        rate = self.pull_bytes_per_s or DEFAULT_TRANSFER_BYTES_PER_S
        available_blocks = load.kv_blocks_total - state.committed_kv_blocks - state.reserved_kv_blocks
        num_taken = state.num_committed_seqs + load.timely_requests + len(state.in_flight)
        num_seats = self._count_seats(state, num_taken)
        num_decodes, context_tokens = self._find_decodes_beside(state)
        prefill = state.latency.compute_prefill_coefficients(num_decodes, context_tokens, state.room_tokens)
        return EngineView(
            engine_id=state.engine_id,
            role=state.role,
            queued_prefill_tokens=state.queued_prefill_tokens,
            free_at_s=state.free_at_s,
            late_s=state.late_s,
            later=self._list_later(state, queued_token_s),
            per_token_s=prefill.per_token_s,
            per_work_s=prefill.per_work_s,
            per_iteration_s=prefill.per_iteration_s,
            room_tokens=state.room_tokens,
            kv_tokens=load.kv_blocks_total * state.config.block_size_tokens,
            available_tokens=available_blocks * state.config.block_size_tokens,
            num_seats=num_seats,
            available_seqs=num_seats - num_taken,
            late_tokens=load.late_prefill_tokens,
            late_requests=load.late_requests,
            transfer_latency_s=TRANSFER_LATENCY_S if transfers else 0.0,
            transfer_per_token_s=state.config.kv_bytes_per_token / rate if transfers else 0.0,
            is_proven=_is_proven(state),
            blocked_reason=_find_blocked_reason(state),
            is_of_others=load.is_of_others,
        )

    def _count_seats(self, state: EngineState, num_taken: int) -> int:
        """Count the requests that an engine may have: all of them decode in the end, with contexts as long as now."""
        load, num_seats = state.load, state.config.max_num_seqs
        if self._limits.decodes_s == math.inf or not load.running_decodes or not _is_proven(state):
            return num_seats
        context_tokens = load.decode_context_tokens / load.running_decodes
        num_fitting = count_fitting_decodes(
            state.latency, self._limits, num_taken, context_tokens, prefill_per_decode=self._prefill_per_decode
        )
        if num_fitting is None:
            return num_seats
        return min(num_seats, max(num_fitting, math.ceil(_LEAST_SEATS_SHARE * num_seats)))

    def _find_decodes_beside(self, state: EngineState) -> tuple[int, int]:
        """Find the decodes that share an engine's iterations with prefills, and the sum of their contexts."""
        return (0, 0) if self._separates_phases else (state.load.running_decodes, state.load.decode_context_tokens)

    def _publish_view(self, state: EngineState, view: EngineView) -> None:
        """Replace what placements see of an engine."""
        self._remove_view(state)
        state.view = view
        self.num_of_others += view.is_of_others
        if view.blocked_reason:
            self._blocked[state.engine_id] = view
            return
        rank = 0 if self._has_uniform_chunk_size or state.role is Role.PREFILL_HEAVY else 1
        token_s = view.per_token_s + view.transfer_per_token_s
        entry: Any = (  # a plain object: as an ``Entry`` it would be taken apart and put together at each use
            view.queued_prefill_tokens + (SHARE_MARGIN_TOKENS if view.is_of_others else 0),
            rank,
            state.number,
            view.free_at_s,
            token_s + view.per_iteration_s / view.room_tokens,
            view.per_work_s * 0.5,
            token_s,
            view.per_iteration_s,
            view.room_tokens,
            view.available_tokens,
            view.transfer_latency_s,
            view,
        )
        state.entry = entry
        insort(self._order, entry)

    def _remove_view(self, state: EngineState) -> None:
        """Remove an engine from wherever it stands."""
        if state.view is None:
            return
        entry: Any = state.entry  # see ``_publish_view``
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]
            state.entry = None
        else:
            del self._blocked[state.engine_id]
        self.num_of_others -= state.view.is_of_others
        state.view = None


def _is_proven(state: EngineState) -> bool:
    """Say whether an engine's latency model has seen ``PROVEN_OBSERVATIONS`` iterations."""
    return state.latency.num_observations >= PROVEN_OBSERVATIONS


def _find_blocked_reason(state: EngineState) -> str:
    """Say why an engine takes no prefill; empty when it does."""
    if state.is_draining:
        return "draining"
    if state.reported_at_s is None:
        return "no_report"
    return "" if state.room_tokens > 0 else "room"
