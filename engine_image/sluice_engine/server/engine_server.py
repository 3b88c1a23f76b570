"""The engine stream: routers on one side, the EngineCore on the other, one message per iteration and router between.

``EngineServer`` owns the state: the links, which request is whose, the load, the plan in force. It changes in
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
from sluice_engine.server.counters import Counters
from sluice_engine.server.plan_part import PlanPart
from sluice_engine.server.router_link import Link, Request, Stamp, Stream, count_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sluice_engine.server.core_client import CoreClient, RequestBuilder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
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
        pace: When what is sent.
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
        pace: Pace | None = None,
        transport: str = "",
    ) -> None:
        self._hello = hello
        self._client = client
        self._builder = builder
        self._clock = clock
        self._pace = pace or Pace()
        self.transport = transport
        self._stamp = Stamp(engine_id=hello.engine_id, epoch=hello.epoch, fingerprint=hello.fingerprint)
        self._links: dict[str, Link] = {}
        self._links_by_number: dict[int, Link] = {}
        self._requests: dict[str, Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_streams = 0
        self._num_core_ids = 0
        self._load = core_messages.Load()
        self._last_report_s = self._last_poll_s = clock()
        self._is_polling = False
        self._owner = ""
        self._plan = PlanPart(hello.max_batch_tokens)
        self.is_draining = False
        self.counters = Counters()

    # --- what others may know ------------------------------------------------------------------------------------

    @property
    def load(self) -> core_messages.Load:
        """The newest load."""
        return self._load

    @property
    def num_routers(self) -> int:
        """Routers with a stream."""
        return sum(link.stream is not None for link in self._links.values())

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return count_requests(self._links.values())

    @property
    def is_drained(self) -> bool:
        """No request runs, and nobody needs KV of this engine any more."""
        return not self._requests and not self._load.kv_blocks_pinned

    # --- streams -------------------------------------------------------------------------------------------------

    def attach(self, router_id: str) -> tuple[Link, Stream]:
        """Starts a router's stream, in the place of its former one."""
        link = self._links.setdefault(router_id, Link(router_id, self._stamp))
        self._links_by_number.pop(link.number, None)
        self._num_streams += 1
        self._links_by_number[self._num_streams] = link
        stream = Stream()
        now_s = self._clock()
        held = link.attach(stream, self._num_streams, now_s)
        self._note_routers()
        hello = wire.EngineHello()
        hello.CopyFrom(self._hello)
        hello.held.extend(held)
        stream.send(
            wire.AttachResponse(hello=hello, load=self._load_report(link, now_s), configured=self._plan.in_force)
        )
        link.last_sent_s = now_s
        return link, stream

    def detach(self, link: Link, stream: Stream) -> None:
        """A stream has ended; its requests are held, unless another stream has taken its place."""
        if link.stream is stream:
            self.counters.num_lost_streams += 1
            link.detach(self._clock())
            self._note_routers()

    def _note_routers(self) -> None:
        """The engine is in the share of one of the routers that are here now."""
        present = [link.router_id for link in self._links.values() if link.stream is not None]
        self._owner = load_sharing.choose_owner(self._stamp.engine_id, present)

    async def take(self, link: Link, message: wire.AttachRequest) -> None:
        """Carries out one batch of commands: what is resumed first, then in the order of the message's fields."""
        for resume in message.resumes:
            if resume.slot in link.by_slot or not link.resume(resume):
                link.add_not_held(resume.slot)
        for submit in message.submits:
            replaced, request = self._open(link, submit)
            if replaced:
                await self._client.abort_requests_async(replaced)
            if request is not None:
                await self._client.add_request_async(request)
        if message.submits:
            self._tell_others(link)
        aborted = self._abort(link, message.aborts)
        if aborted:
            await self._client.abort_requests_async(aborted)
        commands = self._commands(link, message)
        if commands:
            self._start(self._command(link, commands, message.configure))
        self._flush_news(link)

    # --- submits and aborts --------------------------------------------------------------------------------------

    def _open(self, link: Link, submit: wire.Submit) -> tuple[list[str], Any]:
        """Enters a submit.

        Returns:
            Core ids to abort first, and the request for the EngineCore; None when it was refused.
        """
        self.counters.num_submits += 1
        link.received_submit_number = max(link.received_submit_number, submit.submit_number)
        replaced = [request.core_id for request in link.take_held(submit.request_id)]
        if submit.slot in link.by_slot:
            # A slot has one end: the request that is in it goes with the refusal.
            replaced.append(self._forget(link.by_slot[submit.slot]))
            self._refuse(link, submit, f"slot: {submit.slot} is in use")
            return replaced, None
        if submit.HasField("kv") and submit.kv.fingerprint != self._stamp.fingerprint:
            self.counters.num_foreign_kv += 1
        self._num_core_ids += 1
        core_id = f"{submit.request_id}-{self._num_core_ids}"
        extras = wire_conversion.request_extras(
            submit,
            link=link.number,
            grant_key=self._grant_key(link, submit.grant_id) if submit.grant_id else "",
            fingerprint=self._stamp.fingerprint,
            now_s=time.monotonic(),
        )
        try:
            core_request = self._builder.build(core_id, submit, extras)
        except SubmitRefusedError as error:
            self._refuse(link, submit, str(error))
            return replaced, None
        self._requests[core_id] = link.open(core_id, submit)
        return replaced, core_request

    def _refuse(self, link: Link, submit: wire.Submit, error: str) -> None:
        self.counters.num_refused += 1
        link.add_refusal(submit.slot, error)
        link.report_submits(None)

    def _forget(self, request: Request) -> str:
        self._requests.pop(request.core_id, None)
        request.link.drop(request)
        return request.core_id

    def _abort(self, link: Link, aborts: Any) -> list[str]:
        """Ends requests for their router; returns their core ids."""
        core_ids = []
        for abort in aborts:
            if abort.held_request_id:
                core_ids += [self._forget(request) for request in link.take_held(abort.held_request_id)]
            elif request := link.by_slot.get(abort.slot):
                self._finish(request, sampling_pb2.FINISH_REASON_ABORTED)
                core_ids.append(request.core_id)
        return core_ids

    def _finish(self, request: Request, reason: sampling_pb2.FinishReason.ValueType, **details: Any) -> None:
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        request.link.add_finished(request, reason, **details)
        self._requests.pop(request.core_id, None)

    # --- commands ------------------------------------------------------------------------------------------------

    @staticmethod
    def _grant_key(link: Link, grant_id: int) -> str:
        return f"{link.number}.{grant_id}"

    def _commands(self, link: Link, message: wire.AttachRequest) -> list[core_messages.Command]:
        commands: list[core_messages.Command] = []
        for grant in message.grant_requests:
            if grant.cause in wire_conversion.CAUSES:
                key, cause = self._grant_key(link, grant.grant_id), wire_conversion.CAUSES[grant.cause]
                commands.append(core_messages.Grant(key=key, num_tokens=grant.num_tokens, cause=cause))
            else:
                link.send(wire.AttachResponse(grants=[wire.Grant(grant_id=grant.grant_id, reason="cause")]))
        for hand_off in message.hand_offs:
            request = link.by_slot.get(hand_off.slot)
            if request is None or request.fence != hand_off.fence:
                link.add_hand_off_refused(hand_off.slot, "unknown" if request is None else "fence")
            else:
                commands.append(core_messages.HandOff(request_id=request.core_id))
        released = [link.handed_off.pop(slot, "") for slot in message.released_slots]
        commands += [core_messages.Release(request_id=core_id) for core_id in released if core_id]
        commands += [
            core_messages.ReleaseGrant(key=self._grant_key(link, number)) for number in message.released_grant_ids
        ]
        if message.HasField("configure") and (configure := self._configure(link, message.configure)):
            commands.append(configure)
        return commands

    def _configure(self, link: Link, message: wire.Configure) -> core_messages.Configure | None:
        """Takes a plan part if it is newer than the newest; the others are answered with what is in force."""
        try:
            command = self._plan.take(message)
        except ValueError as error:
            link.send(wire.AttachResponse(configured=self._plan.refuse(message, str(error))))
            return None
        if command is None and self._plan.in_force is not None:
            link.send(wire.AttachResponse(configured=self._plan.in_force))
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

    async def _command(self, link: Link, commands: list[core_messages.Command], configure: wire.Configure) -> None:
        """Has a router's commands carried out, and answers them.

        Args:
            link: The router's.
            commands: In order.
            configure: The plan part among them, if there is one.
        """
        number = link.number
        answers = await self._call(commands)
        for answer in answers:
            if isinstance(answer, core_messages.Configured):
                self._answer_configure(link, configure, answer)
            elif link.number == number:  # otherwise the router has another stream by now, and its grants lapse
                self._answer(link, answer)
        self._flush_news(link)

    def _answer(self, link: Link, answer: core_messages.Answer) -> None:
        if isinstance(answer, core_messages.Granted):
            grant_id = int(answer.key.partition(".")[2])
            granted = wire.Grant(
                grant_id=grant_id, is_granted=answer.is_granted, reason=answer.reason, ttl_s=answer.ttl_s
            )
            link.send(wire.AttachResponse(grants=[granted]))
        elif isinstance(answer, core_messages.HandOffAnswer) and not answer.is_accepted:
            request = self._requests.get(answer.request_id)
            if request is not None and request.slot is not None:
                link.add_hand_off_refused(request.slot, answer.reason)

    def _answer_configure(self, link: Link, message: wire.Configure, answer: core_messages.Configured) -> None:
        if answer.error:
            link.send(wire.AttachResponse(configured=self._plan.refuse(message, answer.error)))
        elif configured := self._plan.acknowledge(message, answer):
            for other in self._links.values():
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
        for link in self._links.values():
            is_due = has_submits or now_s - link.last_sent_s >= self._pace.load_report_s
            if link.stream is not None and (is_due or link.has_news()):
                self._flush(link, now_s, iteration)

    def _take_output(self, request: Request, output: Any) -> None:
        if output.prefill_stats is not None:
            request.num_cached_tokens = output.prefill_stats.num_local_cached_tokens
        if output.new_token_ids:
            request.link.add_tokens(request, output.new_token_ids, output.new_logprobs)
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
        await self._call([core_messages.Release(request_id=core_id)])

    def _take_report(self, report: core_messages.Report, now_s: float) -> bool:
        """Takes what an iteration told; returns whether it includes new submits."""
        self._load = report.load
        self._last_report_s = now_s
        if report.iteration is not None:
            self.counters.num_iterations += 1
            self.counters.iteration_s += report.iteration.duration_s
        for proposal in report.proposals:
            if request := self._requests.get(proposal.request_id):
                request.link.add_proposal(request, proposal)
        for core_id in report.returned:
            if request := self._requests.get(core_id):
                self._finish(request, sampling_pb2.FINISH_REASON_RETURNED)
        for refused in report.refused:
            request = self._requests.get(refused.request_id)
            if request is not None and request.slot is not None:
                request.link.add_hand_off_refused(request.slot, refused.reason)
        for number, submit_number in report.last_submit_numbers.items():
            if link := self._links_by_number.get(number):
                link.report_submits(submit_number)
        return bool(report.last_submit_numbers)

    def _flush(self, link: Link, now_s: float, iteration: core_messages.Iteration | None = None) -> None:
        self.counters.num_messages += 1
        self.counters.num_tokens += link.flush(self._load_report(link, now_s, iteration), now_s)

    def _flush_news(self, link: Link) -> None:
        """Sends what happened between two iterations."""
        if link.has_news():
            self._flush(link, self._clock())

    def _tell_others(self, link: Link) -> None:
        """Lets the other routers know at once what a router has submitted."""
        now_s = self._clock()
        for other in self._links.values():
            if other is not link and other.stream is not None:
                self._flush(other, now_s)

    def _load_report(
        self, link: Link, now_s: float, iteration: core_messages.Iteration | None = None
    ) -> wire.LoadReport:
        report = wire_conversion.load_report(self._load)
        report.iteration_age_s = max(0.0, now_s - self._last_report_s)
        report.transport = self.transport
        report.is_draining = report.is_draining or self.is_draining
        if iteration is not None:
            report.iteration.CopyFrom(wire_conversion.iteration_message(iteration))
        load_sharing.describe_for(link, self._links.values(), self._owner, report)
        return report

    # --- the clock -----------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Sends idle reports and ends leases, for ever."""
        while True:
            await asyncio.sleep(self._pace.tick_s)
            expired = self.tick(self._clock())
            if expired:
                await self._client.abort_requests_async(expired)

    def tick(self, now_s: float) -> list[str]:
        """Does what is due; returns the core ids of requests whose lease is over."""
        silence_s = self._pace.idle_report_s - self._pace.tick_s / 2
        if min(now_s - self._last_report_s, now_s - self._last_poll_s) >= silence_s and not self._is_polling:
            self._last_poll_s, self._is_polling = now_s, True
            self._start(self._poll())
        for link in self._links.values():
            if link.stream is not None and now_s - link.last_sent_s >= silence_s:
                self._flush(link, now_s)
        return self._end_leases(now_s)

    async def _poll(self) -> None:
        """Reads the load of an engine that computes nothing: blocks come back and grants lapse without iterations."""
        try:
            for answer in await self._call([core_messages.ReadLoad()]):
                if isinstance(answer, core_messages.Load):
                    self._load = answer
        finally:
            self._is_polling = False

    def _end_leases(self, now_s: float) -> list[str]:
        until_s = now_s - self._pace.lease_s
        expired = []
        for link in list(self._links.values()):
            expired += [self._forget(request) for request in link.take_expired(until_s)]
            if link.lost_at_s is not None and link.lost_at_s <= until_s:
                del self._links[link.router_id]
                self._links_by_number.pop(link.number, None)
        self.counters.num_expired_leases += len(expired)
        return expired

    # --- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Tells the routers and the EngineCore that this engine drains; requests leave or end from now on."""
        self.is_draining = True
        now_s = self._clock()
        for link in self._links.values():
            self._flush(link, now_s)
        await self._call([self._plan.leave()])

    async def close(self, fault: str = "", timeout_s: float = 1.0) -> None:
        """Ends all streams after what waits in them.

        Args:
            fault: Why, when the engine is about to die.
            timeout_s: Longest wait for routers to read.
        """
        streams = [link.stream for link in self._links.values() if link.stream is not None]
        for stream in streams:
            if fault:
                stream.send(wire.AttachResponse(fault=fault))
            stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for stream in streams:
                    await stream.wait_written()
