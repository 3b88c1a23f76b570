"""Commands of a router. Submits, resumes, claims and aborts change the engine's requests (``SubmitHandler``).

Grants, hand-offs, releases and plans become the EngineCore's commands, and its answers messages (``CoreCommands``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine import core_encoding, core_messages
from sluice_engine.errors import SubmitRefusedError
from sluice_engine.kv_transfer.grants import GRANT_TTL_S
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sluice_engine.core_client import CoreClient, RequestBuilder
    from sluice_engine.kv_transfer.kv_handles import KvSource
    from sluice_engine.server.counters import ServerCounters
    from sluice_engine.server.plan_relay import PlanRelay
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


class CoreCommands:
    """Commands to the EngineCore.

    Args:
        client: The EngineCore.
        sessions: The engine's routers and requests.
        plan: The engine's part of the plan.
        kv_source: This engine's KV.
    """

    def __init__(self, client: CoreClient, sessions: SessionTable, plan: PlanRelay, kv_source: KvSource) -> None:
        self._client = client
        self._sessions = sessions
        self._plan = plan
        self._kv_source = kv_source

    async def call(self, commands: list[core_messages.Command]) -> list[core_messages.Answer]:
        """Has commands carried out between two iterations.

        Raises:
            Exception: vLLM's client raises a plain one for whatever goes wrong in the EngineCore.
        """
        encoded = await self._client.call_utility_async(core_messages.UTILITY, core_encoding.encode_commands(commands))
        return core_encoding.decode_answers(encoded)

    # --- from a router ---------------------------------------------------------------------------------------------

    def make(self, session: RouterSession, message: wire.AttachRequest) -> list[core_messages.Command]:
        """Makes the commands of a router's message; what needs no EngineCore is answered at once."""
        commands: list[core_messages.Command] = []
        for grant in message.grant_requests:
            commands += self._make_grant(session, grant)
        for asked in message.kv_offer_requests:
            commands += self._make_offer(session, asked)
        commands += [self._make_part_pull(session, part) for part in message.part_pulls]
        commands += [
            core_messages.ReleaseOfferCommand(key=session.make_grant_key(number))
            for number in message.released_offer_ids
        ]
        for hand_off in message.hand_offs:
            commands += self._make_hand_off(session, hand_off)
        released = [session.handed_off.pop(slot, "") for slot in message.released_slots]
        commands += [core_messages.ReleaseCommand(request_id=core_id) for core_id in released if core_id]
        commands += [
            core_messages.ReleaseGrantCommand(key=session.make_grant_key(number))
            for number in message.released_grant_ids
        ]
        if message.HasField("configure"):
            commands += self._make_configure(session, message.configure)
        return commands

    def _make_grant(self, session: RouterSession, grant: wire.GrantRequest) -> list[core_messages.Command]:
        cause = wire_conversion.CAUSES.get(grant.cause)
        if cause is None:
            session.send(wire.AttachResponse(grants=[wire.Grant(grant_id=grant.grant_id, reason="cause")]))
            return []
        key = session.make_grant_key(grant.grant_id)
        command = core_messages.GrantCommand(key=key, num_tokens=grant.num_tokens, cause=cause, ttl_s=GRANT_TTL_S)
        return [command]

    def _make_offer(self, session: RouterSession, asked: wire.KvOfferRequest) -> list[core_messages.Command]:
        request = session.by_slot.get(asked.slot)
        if request is None or request.fence != asked.fence:
            reason = "unknown" if request is None else "fence"
            session.send(wire.AttachResponse(kv_offers=[wire.KvOffer(offer_id=asked.offer_id, reason=reason)]))
            return []
        key = session.make_grant_key(asked.offer_id)
        return [core_messages.OfferCommand(key=key, request_id=request.core_id, first_token=asked.first_token)]

    def _make_part_pull(self, session: RouterSession, part: wire.PartPull) -> core_messages.PullPartCommand:
        is_readable = part.kv.fingerprint == self._kv_source.fingerprint
        return core_messages.PullPartCommand(
            key=session.make_grant_key(part.grant_id),
            token_ids=list(part.token_ids),
            transfer_params=part.kv.transfer_params_json if is_readable else "",
            cache_salt=part.cache_salt,
        )

    def _make_hand_off(self, session: RouterSession, hand_off: wire.HandOff) -> list[core_messages.Command]:
        request = session.by_slot.get(hand_off.slot)
        if request is None or request.fence != hand_off.fence:
            session.add_hand_off_refused(hand_off.slot, "unknown" if request is None else "fence")
            return []
        command = core_messages.HandOffCommand(request_id=request.core_id, num_output_tokens=hand_off.num_output_tokens)
        return [command]

    def _make_configure(self, session: RouterSession, message: wire.Configure) -> list[core_messages.Command]:
        """Takes a plan part if it is newer than the newest; the others are answered with what is in force."""
        try:
            command = self._plan.take(message)
        except ValueError as error:
            session.send(wire.AttachResponse(configured=self._plan.refuse(message, str(error))))
            return []
        if command is not None:
            return [command]
        if self._plan.in_force is not None:
            session.send(wire.AttachResponse(configured=self._plan.in_force))
        return []

    # --- to the router ---------------------------------------------------------------------------------------------

    async def carry_out(
        self, session: RouterSession, commands: list[core_messages.Command], configure: wire.Configure
    ) -> None:
        """Has a router's commands carried out, and answers them.

        Args:
            session: The router's.
            commands: In order.
            configure: The plan part among them, if there is one.
        """
        number = session.number
        unheard: list[core_messages.Command] = []
        for answer in await self.call(commands):
            if isinstance(answer, core_messages.ConfigureAnswer):
                self._answer_configure(session, configure, answer)
            elif session.number == number:  # otherwise the router has another stream by now, and its grants lapse
                self._answer(session, answer)
            elif isinstance(answer, core_messages.OfferAnswer):
                unheard.append(core_messages.ReleaseOfferCommand(key=answer.key))
        if unheard:
            await self.call(unheard)

    def _answer(self, session: RouterSession, answer: core_messages.Answer) -> None:
        if isinstance(answer, core_messages.GrantAnswer):
            grant = wire.Grant(
                grant_id=session.read_grant_key(answer.key),
                is_granted=answer.is_granted,
                reason=answer.reason,
                ttl_s=answer.ttl_s,
            )
            session.send(wire.AttachResponse(grants=[grant]))
        elif isinstance(answer, core_messages.OfferAnswer):
            offer = wire.KvOffer(offer_id=session.read_grant_key(answer.key), reason=answer.reason)
            if not answer.reason:
                self._kv_source.fill(offer.kv, answer.num_tokens, answer.transfer_params)
            session.send(wire.AttachResponse(kv_offers=[offer]))
        elif isinstance(answer, core_messages.HandOffAnswer) and not answer.is_accepted:
            request = self._sessions.requests.get(answer.request_id)
            if request is not None and request.slot is not None:
                session.add_hand_off_refused(request.slot, answer.reason)

    def _answer_configure(
        self, session: RouterSession, message: wire.Configure, answer: core_messages.ConfigureAnswer
    ) -> None:
        if answer.error:
            session.send(wire.AttachResponse(configured=self._plan.refuse(message, answer.error)))
        elif configured := self._plan.acknowledge(message, answer):
            for other in self._sessions:
                other.send(wire.AttachResponse(configured=configured))
