"""Load reports to routers, each with the message under way.

A message without tokens is a load report: at once after a submit (to every router), otherwise now and then. An idle
engine sends them too, so that a silent engine is a lost one.

A submit shows at once in the load that the other routers are sent, and not only after the iteration under way, which a
long prefill makes hundreds of milliseconds late. The router that sent it counts it itself until a report includes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_engine import core_messages
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice.v1 import engine_pb2 as wire
    from sluice_engine.server.counters import ServerCounters
    from sluice_engine.server.router_session import RouterSession
    from sluice_engine.server.session_table import SessionTable

# Longest silence of a stream, in seconds.
IDLE_REPORT_S = 0.5
# Shortest time between two load reports that follow no submit, in seconds.
LOAD_REPORT_S = 0.05


class LoadReporter:
    """Sends the engine's load.

    Args:
        sessions: The engine's routers.
        counters: What is counted for metrics.
        clock: Monotonic seconds.
        transport: KV transport in use.

    Attributes:
        load: The newest load.
        taken_s: When the newest load of an iteration came.
        transport: KV transport in use; may be set anew.
        is_draining: The serving process drains, whatever the plan says.
    """

    def __init__(
        self, sessions: SessionTable, counters: ServerCounters, clock: Callable[[], float], transport: str
    ) -> None:
        self._sessions = sessions
        self._counters = counters
        self._clock = clock
        self.load = core_messages.SchedulerLoad()
        self.taken_s = clock()
        self.transport = transport
        self.is_draining = False

    def build(
        self, session: RouterSession, now_s: float, iteration: core_messages.IterationReport | None = None
    ) -> wire.LoadReport:
        """Makes the load report for one router."""
        report = wire_conversion.load_report(self.load)
        report.iteration_age_s = max(0.0, now_s - self.taken_s)
        report.transport = self.transport
        report.is_draining = report.is_draining or self.is_draining
        if iteration is not None:
            report.iteration.CopyFrom(wire_conversion.iteration_message(iteration))
        report.is_of_others = self._sessions.owner not in {session.router_id, ""}
        self._add_unreported_submits(session, report)
        return report

    def _add_unreported_submits(self, session: RouterSession, report: wire.LoadReport) -> None:
        """Adds submits of the other routers that the load does not include yet."""
        for other in self._sessions:
            if other is not session:
                for _, num_tokens in other.unreported:
                    report.queued_prefill_tokens += num_tokens
                    report.queued_requests += 1
                    report.queued_attention_work += num_tokens * num_tokens / 2

    def flush(
        self, session: RouterSession, now_s: float, iteration: core_messages.IterationReport | None = None
    ) -> None:
        """Sends the message under way to a router, with the load."""
        self._counters.num_messages += 1
        self._counters.num_tokens += session.flush(self.build(session, now_s, iteration), now_s)

    def flush_news(self, session: RouterSession) -> None:
        """Sends what happened between two iterations, if anything did."""
        if session.has_news():
            self.flush(session, self._clock())

    def flush_others(self, session: RouterSession) -> None:
        """Lets the other routers know at once what a router has submitted."""
        now_s = self._clock()
        for other in self._sessions.connected():
            if other is not session:
                self.flush(other, now_s)

    def flush_due(
        self,
        now_s: float,
        iteration: core_messages.IterationReport | None,
        *,
        has_submits: bool,
    ) -> None:
        """Sends an iteration to the routers that it has something for.

        Args:
            now_s: Time of its receipt.
            iteration: What it computed, if anything.
            has_submits: The load includes submits that no load before it did.
        """
        for session in self._sessions.connected():
            is_due = has_submits or now_s - session.last_sent_s >= LOAD_REPORT_S
            if is_due or session.has_news():
                self.flush(session, now_s, iteration)

    def flush_silent(self, now_s: float, silence_s: float) -> None:
        """Sends the load to the routers that have heard nothing for so long."""
        for session in self._sessions.connected():
            if now_s - session.last_sent_s >= silence_s:
                self.flush(session, now_s)
