"""Finished prefills whose KV stays on its engine until a decode engine grants them room.

The memory of the prefill engines is the queue: first come, first served, and a wait has an end, after which the request
is recomputed and decodes where that is done.

Source: DistServe, section 4.3.
"""

from __future__ import annotations

from sluice_core.records import MoveCause, Role
from sluice_core.sim.cluster import SimCluster
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.moves.hand_offs import SimHandOffs
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import NoGrant


class KeptPrefills:
    """What waits for a grant at one router; mutable.

    Args:
        cluster: Whose engines these are.
        hand_offs: Carries moves out where engines schedule ahead; None: they begin at once.

    Attributes:
        has_targets: First decodes have anywhere to go at all.
    """

    def __init__(self, cluster: SimCluster, hand_offs: SimHandOffs | None) -> None:
        self._cluster = cluster
        self._hand_offs = hand_offs
        self._waiting: dict[int, SimRequest] = {}
        is_bounded = cluster.cell.options.no_grant is not NoGrant.WAIT
        self._limit_s: float | None = cluster.cell.parameters.grant_wait_s if is_bounded else None
        self.has_targets = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: SimRequest, source: SimEngine) -> None:
        """Let a request wait that was handed off to nobody; ``place`` comes next."""
        request.state = RequestState.PARKED
        request.source = source.engine_id
        request.is_leaving = False
        self._waiting[request.index] = request
        if self._limit_s is not None:
            self._cluster.push_grant_expiry(request, self._limit_s)

    def place(self, at_boundary: SimEngine | None = None) -> None:
        """Let those go whose turn has come and for whom there is room.

        Args:
            at_boundary: An engine that is between two iterations.
        """
        if not self._waiting:
            return
        self.forget_placed()
        for request in list(self._waiting.values()):
            if request.is_leaving or request.state is not RequestState.PARKED:
                continue
            assert request.source is not None
            source = self._cluster.get_engine(request.source)
            if not self.has_targets or source.role is Role.DECODE_HEAVY:
                self._stay(request, source)  # the plan has changed, or the decode engines have died
                continue
            cause = MoveCause.PREFILL_DONE
            target = self._cluster.find_target(request, cause, source, request.num_blocks)
            if target is None:
                return
            if self._hand_offs is None:
                del self._waiting[request.index]
                self._cluster.begin_transfer(request, source, target, cause)
            else:
                self._hand_offs.ask_for_room(request, source, target, at_boundary)
                if request.state is not RequestState.PARKED:
                    del self._waiting[request.index]

    def forget_placed(self) -> None:
        """Forget those that have got a grant meanwhile."""
        placed = [index for index, request in self._waiting.items() if request.state is not RequestState.PARKED]
        for index in placed:
            del self._waiting[index]

    def expire(self, request: SimRequest) -> None:
        """End the wait of a request: it is recomputed, and decodes in place."""
        if request.state is RequestState.PARKED:
            assert request.source is not None
            self._recompute(request, self._cluster.get_engine(request.source))

    def fail(self, engine: SimEngine) -> None:
        """Recover what waited on an engine that has died."""
        lost = [request for request in self._waiting.values() if request.source == engine.engine_id]
        for request in lost:
            del self._waiting[request.index]
            if request.state is RequestState.PARKED:
                request.is_leaving = False
                self._cluster.hold(request)

    def _stay(self, request: SimRequest, source: SimEngine) -> None:
        """Let a request decode where it was prefilled; with engines that schedule ahead it is recomputed."""
        if self._hand_offs is not None:
            self._recompute(request, source)
            return
        del self._waiting[request.index]
        request.state = RequestState.MOVING
        source.resume(request)
        self._cluster.start_engine(source)

    def _recompute(self, request: SimRequest, source: SimEngine) -> None:
        del self._waiting[request.index]
        request.is_leaving = False
        source.release(request.num_blocks, request.num_kv_tokens, request.source_table)
        self._cluster.start_engine(source)
        self._cluster.recover(request)
