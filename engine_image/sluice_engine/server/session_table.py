"""The routers of an engine and their requests; changed by the server's handlers, in functions without ``await``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice_core.router_shares import choose_owner
from sluice_engine.server.attach_stream import AttachStream
from sluice_engine.server.resumption.resumable_requests import ResumableRequests
from sluice_engine.server.router_session import RouterSession

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice.v1 import engine_pb2 as wire
    from sluice.v1 import sampling_pb2
    from sluice_engine import core_messages
    from sluice_engine.kv_transfer.kv_handles import KvSource
    from sluice_engine.server.counters import ServerCounters
    from sluice_engine.server.router_session import RouterRequest


class SessionTable:
    """All sessions and requests of one engine.

    Args:
        kv_source: Where the KV of this engine lies.
        counters: What is counted for metrics.

    Attributes:
        requests: Requests that have not ended, by their id in the EngineCore.
        resumable: Requests that another router may go on with.
        owner: Router in whose share the engine is.
    """

    def __init__(self, kv_source: KvSource, counters: ServerCounters) -> None:
        self._kv_source = kv_source
        self._counters = counters
        self._by_router: dict[str, RouterSession] = {}
        self._by_stream: dict[int, RouterSession] = {}
        self._num_streams = 0
        self.requests: dict[str, RouterRequest] = {}
        self.resumable = ResumableRequests(counters)
        self.owner = ""
        self._cached_blocks: set[int] = set()

    # --- sessions --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[RouterSession]:
        return iter(self._by_router.values())

    def connected(self) -> list[RouterSession]:
        """Sessions with a stream."""
        return [session for session in self if session.stream is not None]

    def get_by_stream(self, number: int) -> RouterSession | None:
        """The session whose present stream has a number."""
        return self._by_stream.get(number)

    def attach(self, router_id: str, now_s: float) -> tuple[RouterSession, AttachStream, list[wire.HeldRequest]]:
        """Starts a router's stream, in the place of its former one.

        Returns:
            The session, its stream, and the requests that are held for it.
        """
        session = self._by_router.setdefault(router_id, RouterSession(router_id, self._kv_source))
        self._by_stream.pop(session.number, None)
        self._num_streams += 1
        self._by_stream[self._num_streams] = session
        stream = AttachStream()
        held = session.attach(stream, self._num_streams, now_s, self._cached_blocks)
        self._choose_owner()
        return session, stream, held

    def detach(self, session: RouterSession, now_s: float) -> None:
        """Holds the requests of a session whose stream has ended."""
        self._counters.num_lost_streams += 1
        session.detach(now_s)
        self._choose_owner()

    def _choose_owner(self) -> None:
        self.owner = choose_owner(self._kv_source.engine_id, [session.router_id for session in self.connected()])

    def report_prefixes(self, changes: core_messages.PrefixChanges) -> None:
        """Tells the routers what changed in the prefix cache, with their next messages."""
        self._cached_blocks.update(changes.stored)
        self._cached_blocks.difference_update(changes.removed)
        for session in self.connected():
            session.prefixes.add(changes.stored, changes.removed)

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return sum(len(session.by_slot) + sum(held.ended is None for held in session.held.values()) for session in self)

    def forget(self, request: RouterRequest) -> str:
        """Forgets a request without a word to its router; returns its core id."""
        self.requests.pop(request.core_id, None)
        self.resumable.forget(request)
        request.session.drop(request)
        return request.core_id

    def finish(
        self, request: RouterRequest, reason: sampling_pb2.FinishReason.ValueType, now_s: float, **details: Any
    ) -> None:
        """Ends a request for its router; ``details`` are those of ``RouterSession.add_finished``."""
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1
        finished = request.session.add_finished(request, reason, **details)
        self.requests.pop(request.core_id, None)
        if request.submit is not None:
            self.resumable.keep_end(request, finished, now_s)

    def end_leases(self, until_s: float, resumable_until_s: float) -> list[str]:
        """Forgets requests whose stream was lost then or before, and routers that have been away since.

        Args:
            until_s: For requests that their own router alone can resume, and for routers.
            resumable_until_s: For requests that any router can.

        Returns:
            Core ids of the requests.
        """
        expired = []
        self.resumable.sweep(resumable_until_s)
        for session in list(self):
            expired += [self.forget(request) for request in session.take_expired(until_s, resumable_until_s)]
            if session.lost_at_s is not None and session.lost_at_s <= until_s and not session.held:
                del self._by_router[session.router_id]
                self._by_stream.pop(session.number, None)
        self._counters.num_expired_leases += len(expired)
        return expired
