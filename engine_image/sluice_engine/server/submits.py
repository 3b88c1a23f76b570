"""Submits, resumes and aborts of a router."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sluice.v1 import sampling_pb2
from sluice_engine.errors import SubmitRefusedError
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sluice.v1 import engine_pb2 as wire
    from sluice_engine.core_client import RequestBuilder
    from sluice_engine.server.counters import ServerCounters
    from sluice_engine.server.router_session import RouterSession
    from sluice_engine.server.session_table import SessionTable


class SubmitHandler:
    """Enters requests into the session table, and takes them out.

    Args:
        sessions: The engine's routers and requests.
        builder: Makes the EngineCore's requests.
        fingerprint: This engine's.
        counters: What is counted for metrics.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        sessions: SessionTable,
        builder: RequestBuilder,
        fingerprint: str,
        counters: ServerCounters,
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._builder = builder
        self._fingerprint = fingerprint
        self._counters = counters
        self._clock = clock
        self._num_core_ids = 0

    def resume(self, session: RouterSession, resumes: Iterable[wire.Resume]) -> None:
        """Gives held requests their slots on the new stream; one that is not held any more ends there."""
        for resume in resumes:
            if resume.slot in session.by_slot or not session.resume(resume):
                session.add_not_held(resume.slot)

    def claim(self, session: RouterSession, claims: Iterable[wire.Claim]) -> None:
        """Lets a router go on with requests that another one had."""
        for claim in claims:
            session.add_claim_answer(self._sessions.resumable.claim(session, claim.resume_key, self._clock()))

    def open(self, session: RouterSession, submit: wire.Submit) -> tuple[list[str], Any]:
        """Enters a submit.

        Returns:
            Core ids to abort first, and the request for the EngineCore; None when it was refused.
        """
        self._counters.num_submits += 1
        session.received_submit_number = max(session.received_submit_number, submit.submit_number)
        # The router has lost count of what is held for it, or would have resumed it: the new submit takes its place.
        replaced = [self._sessions.forget(request) for request in session.take_held(submit.request_id)]
        if submit.slot in session.by_slot:
            # A slot has one end: the request that is in it goes with the refusal.
            replaced.append(self._sessions.forget(session.by_slot[submit.slot]))
            self._refuse(session, submit, f"slot: {submit.slot} is in use")
            return replaced, None
        if self._sessions.resumable.refuses(submit, session.router_id):
            self._sessions.resumable.keep_refused(session, submit, self._clock())
            session.add_claimed(submit.slot)
            session.report_submits(None)
            return replaced, None
        if submit.HasField("kv") and submit.kv.fingerprint != self._fingerprint:
            self._counters.num_foreign_kv += 1
        self._num_core_ids += 1
        core_id = f"{submit.request_id}-{self._num_core_ids}"
        extras = wire_conversion.request_extras(
            submit,
            stream_number=session.number,
            grant_key=session.make_grant_key(submit.grant_id) if submit.grant_id else "",
            fingerprint=self._fingerprint,
            now_s=time.monotonic(),
        )
        try:
            core_request = self._builder.build(core_id, submit, extras)
        except SubmitRefusedError as error:
            self._refuse(session, submit, str(error))
            return replaced, None
        request = self._sessions.requests[core_id] = session.open(core_id, submit)
        if submit.resume_key:
            self._sessions.resumable.enter(request, submit, self._clock())
        return replaced, core_request

    def _refuse(self, session: RouterSession, submit: wire.Submit, error: str) -> None:
        self._counters.num_refused += 1
        session.add_refusal(submit.slot, error)
        session.report_submits(None)

    def abort(self, session: RouterSession, aborts: Iterable[wire.Abort]) -> list[str]:
        """Ends requests for their router; returns their core ids."""
        core_ids = []
        for abort in aborts:
            if abort.held_request_id:
                core_ids += [self._sessions.forget(request) for request in session.take_held(abort.held_request_id)]
            elif request := session.by_slot.get(abort.slot):
                self._sessions.finish(request, sampling_pb2.FINISH_REASON_ABORTED, self._clock())
                core_ids.append(request.core_id)
        return core_ids
