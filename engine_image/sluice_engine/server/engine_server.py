"""The engine stream: routers on one side, the EngineCore on the other, one message per iteration and router between.

``EngineServer`` owns the state: the sessions, which request is whose, the load, the plan in force. It changes in
functions without ``await``; the coroutines around them only wait for streams, for outputs and for the clock.
An iteration's outputs become one message per router that has something to hear. A message without tokens is a load
report: at once after a submit (to every router), at most every 50 ms otherwise, and every 500 ms from an idle engine,
so that silence is a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine import core_messages
from sluice_engine.errors import SubmitRefusedError
from sluice_engine.server import load_sharing, wire_conversion
from sluice_engine.server.counters import ServerCounters
from sluice_engine.server.plan_in_force import PlanInForce
from sluice_engine.server.router_session import AttachStream, KvSource, RouterRequest, RouterSession, count_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sluice_engine.core_client import CoreClient, RequestBuilder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIntervals:
    """When what is sent.

    Args:
        idle_report_s: Longest silence of a stream.
        load_report_s: Shortest time between two load reports that follow no submit.
        lease_s: Time for which the requests of a lost stream go on.
        tick_s: Resolution of the first and the last.
    """

    idle_report_s: float = 0.5
    load_report_s: float = 0.05
    lease_s: float = 10.0
    tick_s: float = 0.1


class EngineServer:
    """An engine, as its routers see it.

    Args:
        hello: What every stream is told first; its epoch and fingerprint go into KV handles.
        client: The EngineCore.
        builder: Makes its requests.
        clock: Monotonic seconds.
        intervals: When what is sent.
        transport: KV transport in use.

    Attributes:
        transport: The same; may be set anew.
    """

    def __init__(
        self,
        hello: wire.EngineHello,
        client: CoreClient,
        builder: RequestBuilder,
        *,
        clock: Callable[[], float],
        intervals: ServerIntervals | None = None,
        transport: str = "",
    ) -> None:
        self._hello = hello
        self._client = client
        self._builder = builder
        self._clock = clock
        self._intervals = intervals or ServerIntervals()
        self.transport = transport
        self._kv_source = KvSource(engine_id=hello.engine_id, epoch=hello.epoch, fingerprint=hello.fingerprint)
        self._sessions: dict[str, RouterSession] = {}
        self._sessions_by_stream: dict[int, RouterSession] = {}
        self._requests: dict[str, RouterRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_streams = 0
        self._num_core_ids = 0
        self._load = core_messages.SchedulerLoad()
        self._last_report_s = self._last_poll_s = clock()
        self._is_polling = False
        self._owner = ""
        self._plan = PlanInForce(hello.max_batch_tokens)
        self.is_draining = False
        self.counters = ServerCounters()

    # --- what others may know ------------------------------------------------------------------------------------

    @property
    def load(self) -> core_messages.SchedulerLoad:
        """The newest load."""
        return self._load

    @property
    def num_routers(self) -> int:
        """Routers with a stream."""
        return sum(session.stream is not None for session in self._sessions.values())

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return count_requests(self._sessions.values())

    @property
    def is_drained(self) -> bool:
        """No request runs, and nobody needs KV of this engine any more."""
        return not self._requests and not self._load.kv_blocks_pinned

    # --- streams -------------------------------------------------------------------------------------------------

    def attach(self, router_id: str) -> tuple[RouterSession, AttachStream]:
        """Starts a router's stream, in the place of its former one."""
        session = self._sessions.setdefault(router_id, RouterSession(router_id, self._kv_source))
        self._sessions_by_stream.pop(session.number, None)
        self._num_streams += 1
        self._sessions_by_stream[self._num_streams] = session
        stream = AttachStream()
        now_s = self._clock()
        held = session.attach(stream, self._num_streams, now_s)
        self._note_routers()
        hello = wire.EngineHello()
        hello.CopyFrom(self._hello)
        hello.held.extend(held)
        stream.send(
            wire.AttachResponse(hello=hello, load=self._load_report(session, now_s), configured=self._plan.in_force)
        )
        session.last_sent_s = now_s
        return session, stream

    def detach(self, session: RouterSession, stream: AttachStream) -> None:
        """A stream has ended; its requests are held, unless another stream has taken its place."""
        if session.stream is stream:
            self.counters.num_lost_streams += 1
            session.detach(self._clock())
            self._note_routers()

    def _note_routers(self) -> None:
        """The engine is in the share of one of the routers that are here now."""
        present = [session.router_id for session in self._sessions.values() if session.stream is not None]
        self._owner = load_sharing.choose_owner(self._kv_source.engine_id, present)

    async def take(self, session: RouterSession, message: wire.AttachRequest) -> None:
        """Carries out one batch of commands: what is resumed first, then in the order of the message's fields."""
        for resume in message.resumes:
            if resume.slot in session.by_slot or not session.resume(resume):
                session.add_not_held(resume.slot)
        for submit in message.submits:
            replaced, request = self._open(session, submit)
            if replaced:
                await self._client.abort_requests_async(replaced)
            if request is not None:
                await self._client.add_request_async(request)
        if message.submits:
            self._tell_others(session)
        aborted = self._abort(session, message.aborts)
        if aborted:
            await self._client.abort_requests_async(aborted)
        commands = self._commands(session, message)
        if commands:
            self._start(self._command(session, commands, message.configure))
        self._flush_news(session)

    # --- submits and aborts --------------------------------------------------------------------------------------

    def _open(self, session: RouterSession, submit: wire.Submit) -> tuple[list[str], Any]:
        """Enters a submit.

        Returns:
            Core ids to abort first, and the request for the EngineCore; None when it was refused.
        """
        self.counters.num_submits += 1
        session.received_submit_number = max(session.received_submit_number, submit.submit_number)
        replaced = [request.core_id for request in session.take_held(submit.request_id)]
        if submit.slot in session.by_slot:
            # A slot has one end: the request that is in it goes with the refusal.
            replaced.append(self._forget(session.by_slot[submit.slot]))
            self._refuse(session, submit, f"slot: {submit.slot} is in use")
            return replaced, None
        if submit.HasField("kv") and submit.kv.fingerprint != self._kv_source.fingerprint:
            self.counters.num_foreign_kv += 1
        self._num_core_ids += 1
        core_id = f"{submit.request_id}-{self._num_core_ids}"
        extras = wire_conversion.request_extras(
            submit,
            stream_number=session.number,
            grant_key=self._grant_key(session, submit.grant_id) if submit.grant_id else "",
            fingerprint=self._kv_source.fingerprint,
            now_s=time.monotonic(),
        )
        try:
            core_request = self._builder.build(core_id, submit, extras)
        except SubmitRefusedError as error:
            self._refuse(session, submit, str(error))
            return replaced, None
        self._requests[core_id] = session.open(core_id, submit)
        return replaced, core_request

    def _refuse(self, session: RouterSession, submit: wire.Submit, error: str) -> None:
        self.counters.num_refused += 1
        session.add_refusal(submit.slot, error)
        session.report_submits(None)

    def _forget(self, request: RouterRequest) -> str:
        self._requests.pop(request.core_id, None)
        request.session.drop(request)
        return request.core_id

    def _abort(self, session: RouterSession, aborts: Any) -> list[str]:
        """Ends requests for their router; returns their core ids."""
        core_ids = []
        for abort in aborts:
            if abort.held_request_id:
                core_ids += [self._forget(request) for request in session.take_held(abort.held_request_id)]
            elif request := session.by_slot.get(abort.slot):
                self._finish(request, sampling_pb2.FINISH_REASON_ABORTED)
                core_ids.append(request.core_id)
        return core_ids

    def _finish(self, request: RouterRequest, reason: sampling_pb2.FinishReason.ValueType, **details: Any) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        request.session.add_finished(request, reason, **details)
        self._requests.pop(request.core_id, None)

    # --- commands ------------------------------------------------------------------------------------------------

    @staticmethod
    def _grant_key(session: RouterSession, grant_id: int) -> str:
        return f"{session.number}.{grant_id}"

    def _commands(self, session: RouterSession, message: wire.AttachRequest) -> list[core_messages.Command]:
        commands: list[core_messages.Command] = []
        for grant in message.grant_requests:
            if grant.cause in wire_conversion.CAUSES:
                key, cause = self._grant_key(session, grant.grant_id), wire_conversion.CAUSES[grant.cause]
                commands.append(core_messages.GrantCommand(key=key, num_tokens=grant.num_tokens, cause=cause))
            else:
                session.send(wire.AttachResponse(grants=[wire.Grant(grant_id=grant.grant_id, reason="cause")]))
        for hand_off in message.hand_offs:
            request = session.by_slot.get(hand_off.slot)
            if request is None or request.fence != hand_off.fence:
                session.add_hand_off_refused(hand_off.slot, "unknown" if request is None else "fence")
            else:
                commands.append(core_messages.HandOffCommand(request_id=request.core_id))
        released = [session.handed_off.pop(slot, "") for slot in message.released_slots]
        commands += [core_messages.ReleaseCommand(request_id=core_id) for core_id in released if core_id]
        commands += [
            core_messages.ReleaseGrantCommand(key=self._grant_key(session, number))
            for number in message.released_grant_ids
        ]
        if message.HasField("configure") and (configure := self._configure(session, message.configure)):
            commands.append(configure)
        return commands

    def _configure(self, session: RouterSession, message: wire.Configure) -> core_messages.ConfigureCommand | None:
        """Takes a plan part if it is newer than the newest; the others are answered with what is in force."""
        try:
            command = self._plan.take(message)
        except ValueError as error:
            session.send(wire.AttachResponse(configured=self._plan.refuse(message, str(error))))
            return None
        if command is None and self._plan.in_force is not None:
            session.send(wire.AttachResponse(configured=self._plan.in_force))
        return command

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, commands: list[core_messages.Command]) -> list[core_messages.Answer]:
        """Has commands carried out between two iterations; a failure costs this batch, not the engine."""
        try:
            encoded = await self._client.call_utility_async(
                core_messages.UTILITY, core_messages.encode_commands(commands)
            )
            return core_messages.decode_answers(encoded)
        except Exception:
            logger.exception("the EngineCore did not carry out %s", commands)
            return []

    async def _command(
        self, session: RouterSession, commands: list[core_messages.Command], configure: wire.Configure
    ) -> None:
        """Has a router's commands carried out, and answers them.

        Args:
            session: The router's.
            commands: In order.
            configure: The plan part among them, if there is one.
        """
        number = session.number
        answers = await self._call(commands)
        for answer in answers:
            if isinstance(answer, core_messages.ConfigureAnswer):
                self._answer_configure(session, configure, answer)
            elif session.number == number:  # otherwise the router has another stream by now, and its grants lapse
                self._answer(session, answer)
        self._flush_news(session)

    def _answer(self, session: RouterSession, answer: core_messages.Answer) -> None:
        if isinstance(answer, core_messages.GrantAnswer):
            grant_id = int(answer.key.partition(".")[2])
            granted = wire.Grant(
                grant_id=grant_id, is_granted=answer.is_granted, reason=answer.reason, ttl_s=answer.ttl_s
            )
            session.send(wire.AttachResponse(grants=[granted]))
        elif isinstance(answer, core_messages.HandOffAnswer) and not answer.is_accepted:
            request = self._requests.get(answer.request_id)
            if request is not None and request.slot is not None:
                session.add_hand_off_refused(request.slot, answer.reason)

    def _answer_configure(
        self, session: RouterSession, message: wire.Configure, answer: core_messages.ConfigureAnswer
    ) -> None:
        if answer.error:
            session.send(wire.AttachResponse(configured=self._plan.refuse(message, answer.error)))
        elif configured := self._plan.acknowledge(message, answer):
            for other in self._sessions.values():
                other.send(wire.AttachResponse(configured=configured))

    # --- outputs -------------------------------------------------------------------------------------------------

    async def pump(self) -> None:
        """Passes outputs on for ever.

        Raises:
            Exception: The EngineCore is dead (vLLM's ``EngineDeadError``), or its output cannot be read.
        """
        while True:
            outputs = await self._client.get_output_async()
            self.take_outputs(outputs, self._clock())

    def take_outputs(self, outputs: Any, now_s: float) -> None:
        """Sends one iteration to the routers.

        Args:
            outputs: vLLM's ``EngineCoreOutputs``.
            now_s: Time of its receipt.
        """
        report = None
        requests = self._requests
        for output in outputs.outputs:
            request = requests.get(output.request_id)
            if request is not None:
                self._take_output(request, output)
            elif output.request_id == core_messages.REPORT_ID:
                report = core_messages.decode_report(output.kv_transfer_params)
        has_submits = False
        iteration = None
        if report is not None:
            has_submits = self._take_report(report, now_s)
            iteration = report.iteration
        for session in self._sessions.values():
            is_due = has_submits or now_s - session.last_sent_s >= self._intervals.load_report_s
            if session.stream is not None and (is_due or session.has_news()):
                self._flush(session, now_s, iteration)

    def _take_output(self, request: RouterRequest, output: Any) -> None:
        if output.prefill_stats is not None:
            request.num_cached_tokens = output.prefill_stats.num_local_cached_tokens
        if output.new_token_ids:
            request.session.add_tokens(request, output.new_token_ids, output.new_logprobs)
        if output.finish_reason is None:
            return
        handed_off = core_messages.decode_hand_off(output.kv_transfer_params)
        if handed_off is not None:
            is_held = request.slot is None
            self._finish(request, sampling_pb2.FINISH_REASON_HANDED_OFF, handed_off=handed_off)
            if is_held:
                # Nobody was told where the KV lies, and so nobody reads it.
                self._start(self._release(request.core_id))
            return
        reason = wire_conversion.FINISH_REASONS[output.finish_reason]
        stop = output.stop_reason if isinstance(output.stop_reason, int) else None
        error = "the engine could not go on with the request" if reason == sampling_pb2.FINISH_REASON_ERROR else ""
        self._finish(request, reason, stop_token_id=stop, error=error)

    async def _release(self, core_id: str) -> None:
        await self._call([core_messages.ReleaseCommand(request_id=core_id)])

    def _take_report(self, report: core_messages.SchedulerReport, now_s: float) -> bool:
        """Takes what an iteration told; returns whether it includes new submits."""
        self._load = report.load
        self._last_report_s = now_s
        if report.iteration is not None:
            self.counters.num_iterations += 1
            self.counters.iteration_s += report.iteration.duration_s
        for proposal in report.proposals:
            if request := self._requests.get(proposal.request_id):
                request.session.add_proposal(request, proposal)
        for core_id in report.returned:
            if request := self._requests.get(core_id):
                self._finish(request, sampling_pb2.FINISH_REASON_RETURNED)
        for refused in report.refused:
            request = self._requests.get(refused.request_id)
            if request is not None and request.slot is not None:
                request.session.add_hand_off_refused(request.slot, refused.reason)
        for number, submit_number in report.last_submit_numbers.items():
            if session := self._sessions_by_stream.get(number):
                session.report_submits(submit_number)
        return bool(report.last_submit_numbers)

    def _flush(
        self, session: RouterSession, now_s: float, iteration: core_messages.IterationReport | None = None
    ) -> None:
        self.counters.num_messages += 1
        self.counters.num_tokens += session.flush(self._load_report(session, now_s, iteration), now_s)

    def _flush_news(self, session: RouterSession) -> None:
        """Sends what happened between two iterations."""
        if session.has_news():
            self._flush(session, self._clock())

    def _tell_others(self, session: RouterSession) -> None:
        """Lets the other routers know at once what a router has submitted."""
        now_s = self._clock()
        for other in self._sessions.values():
            if other is not session and other.stream is not None:
                self._flush(other, now_s)

    def _load_report(
        self, session: RouterSession, now_s: float, iteration: core_messages.IterationReport | None = None
    ) -> wire.LoadReport:
        report = wire_conversion.load_report(self._load)
        report.iteration_age_s = max(0.0, now_s - self._last_report_s)
        report.transport = self.transport
        report.is_draining = report.is_draining or self.is_draining
        if iteration is not None:
            report.iteration.CopyFrom(wire_conversion.iteration_message(iteration))
        load_sharing.describe_for(session, self._sessions.values(), self._owner, report)
        return report

    # --- the clock -----------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Sends idle reports and ends leases, for ever."""
        while True:
            await asyncio.sleep(self._intervals.tick_s)
            expired = self.tick(self._clock())
            if expired:
                await self._client.abort_requests_async(expired)

    def tick(self, now_s: float) -> list[str]:
        """Does what is due; returns the core ids of requests whose lease is over."""
        silence_s = self._intervals.idle_report_s - self._intervals.tick_s / 2
        if min(now_s - self._last_report_s, now_s - self._last_poll_s) >= silence_s and not self._is_polling:
            self._last_poll_s, self._is_polling = now_s, True
            self._start(self._poll())
        for session in self._sessions.values():
            if session.stream is not None and now_s - session.last_sent_s >= silence_s:
                self._flush(session, now_s)
        return self._end_leases(now_s)

    async def _poll(self) -> None:
        """Reads the load of an engine that computes nothing: blocks come back and grants lapse without iterations."""
        try:
            for answer in await self._call([core_messages.ReadLoadCommand()]):
                if isinstance(answer, core_messages.SchedulerLoad):
                    self._load = answer
        finally:
            self._is_polling = False

    def _end_leases(self, now_s: float) -> list[str]:
        until_s = now_s - self._intervals.lease_s
        expired = []
        for session in list(self._sessions.values()):
            expired += [self._forget(request) for request in session.take_expired(until_s)]
            if session.lost_at_s is not None and session.lost_at_s <= until_s:
                del self._sessions[session.router_id]
                self._sessions_by_stream.pop(session.number, None)
        self.counters.num_expired_leases += len(expired)
        return expired

    # --- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Tells the routers and the EngineCore that this engine drains; requests leave or end from now on."""
        self.is_draining = True
        now_s = self._clock()
        for session in self._sessions.values():
            self._flush(session, now_s)
        await self._call([self._plan.leave()])

    async def close(self, fault: str = "", timeout_s: float = 1.0) -> None:
        """Ends all streams after what waits in them.

        Args:
            fault: Why, when the engine is about to die.
            timeout_s: Longest wait for routers to read.
        """
        streams = [session.stream for session in self._sessions.values() if session.stream is not None]
        for stream in streams:
            if fault:
                stream.send(wire.AttachResponse(fault=fault))
            stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for stream in streams:
                    await stream.wait_written()
