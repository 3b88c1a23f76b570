"""The engine stream: routers on one side, the EngineCore on the other, one message per iteration and router between.

State changes in functions without ``await``; the coroutines only wait for streams, for outputs and for the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from sluice.v1 import engine_pb2 as wire
from sluice_engine import core_messages
from sluice_engine.kv_transfer.kv_handles import KvSource
from sluice_engine.resume_timeouts import LEASE_S, RESUME_TIMEOUT_S
from sluice_engine.server.core_outputs import find_report, take_report, take_tokens
from sluice_engine.server.counters import ServerCounters
from sluice_engine.server.load_reporter import IDLE_REPORT_S, LoadReporter
from sluice_engine.server.plan_relay import PlanRelay
from sluice_engine.server.router_commands import CoreCommands, SubmitHandler
from sluice_engine.server.session_table import SessionTable
from sluice_engine.server.usage_relay import UsageRelay

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sluice_engine.core_client import CoreClient, RequestBuilder
    from sluice_engine.server.attach_stream import AttachStream
    from sluice_engine.server.router_session import RouterSession

logger = logging.getLogger(__name__)

# Resolution of what happens by the clock, in seconds.
TICK_S = 0.1


class EngineServer:
    """An engine, as its routers see it.

    Args:
        hello: First message of every stream; its epoch and fingerprint go into KV handles.
        client: The EngineCore.
        builder: Makes its requests.
        clock: Monotonic seconds.
        lease_s: Time for which the requests of a lost stream go on.
        resume_timeout_s: The same for requests that any router can resume, and the time for which their ends are kept.
        transport: KV transport in use.
    """

    def __init__(
        self,
        hello: wire.EngineHello,
        client: CoreClient,
        builder: RequestBuilder,
        *,
        clock: Callable[[], float],
        lease_s: float = LEASE_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        transport: str = "",
    ) -> None:
        self._hello = hello
        self._client = client
        self._clock = clock
        self._lease_s = lease_s
        self._resume_timeout_s = resume_timeout_s
        self.counters = ServerCounters()
        kv_source = KvSource(engine_id=hello.engine_id, epoch=hello.epoch, fingerprint=hello.fingerprint)
        self._sessions = SessionTable(kv_source, self.counters)
        self._usage = UsageRelay()
        self._plan = PlanRelay(hello.max_batch_tokens)
        self._reports = LoadReporter(self._sessions, self.counters, clock, transport)
        self._submits = SubmitHandler(self._sessions, builder, hello.fingerprint, self.counters, clock)
        self._commands = CoreCommands(client, self._sessions, self._plan, kv_source)
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_poll_s = clock()
        self._is_polling = False

    # --- what others may know ------------------------------------------------------------------------------------

    @property
    def load(self) -> core_messages.SchedulerLoad:
        """The newest load."""
        return self._reports.load

    @property
    def transport(self) -> str:
        """KV transport in use, which load reports name; may be set anew."""
        return self._reports.transport

    @transport.setter
    def transport(self, transport: str) -> None:
        self._reports.transport = transport

    @property
    def num_routers(self) -> int:
        """Routers with a stream."""
        return len(self._sessions.connected())

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self._sessions.num_requests

    @property
    def num_held(self) -> int:
        """Requests that run for a router whose stream is lost."""
        return sum(len(session.held) for session in list(self._sessions))

    @property
    def num_kept_ends(self) -> int:
        """Ended requests whose clients may still ask for their last tokens."""
        return self._sessions.resumable.num_ended

    @property
    def is_draining(self) -> bool:
        """True from the start of the process's drain on."""
        return self._reports.is_draining

    @property
    def is_drained(self) -> bool:
        """No request runs, and nobody needs KV of this engine any more."""
        return not self._sessions.requests and not self.load.kv_blocks_pinned

    @property
    def is_awaited(self) -> bool:
        """A router that ends itself waits for requests that run here."""
        return any(session.is_leaving and session.by_slot for session in self._sessions.connected())

    # --- from routers --------------------------------------------------------------------------------------------

    def attach(self, router_id: str) -> tuple[RouterSession, AttachStream]:
        """Starts a router's stream, in the place of its former one."""
        now_s = self._clock()
        session, stream, held = self._sessions.attach(router_id, now_s)
        hello = wire.EngineHello()
        hello.CopyFrom(self._hello)
        hello.held.extend(held)
        hello.resume_timeout_s = self._resume_timeout_s
        load = self._reports.build(session, now_s)
        usage = self._usage.list_others(router_id, now_s)
        stream.send(wire.AttachResponse(hello=hello, load=load, configured=self._plan.in_force, usage=usage))
        session.last_sent_s = now_s
        return session, stream

    def detach(self, session: RouterSession, stream: AttachStream) -> None:
        """A stream has ended; its requests are held, unless another stream has taken its place."""
        if session.stream is stream:
            self._sessions.detach(session, self._clock())

    async def take(self, session: RouterSession, message: wire.AttachRequest) -> None:
        """Carries out one batch of commands: what is resumed first, then in the order of the message's fields."""
        session.is_leaving = session.is_leaving or message.is_leaving
        if message.HasField("usage"):
            self._pass_on(session, message.usage)
        self._submits.resume(session, message.resumes)
        if message.claims:
            self._submits.claim(session, message.claims)
            # A router whose request was claimed hears of it at once.
            self._reports.flush_others(session)
        for submit in message.submits:
            replaced, request = self._submits.open(session, submit)
            if replaced:
                await self._client.abort_requests_async(replaced)
            if request is not None:
                await self._client.add_request_async(request)
        if message.submits:
            self._reports.flush_others(session)
        aborted = self._submits.abort(session, message.aborts)
        if aborted:
            await self._client.abort_requests_async(aborted)
        commands = self._commands.make(session, message)
        if commands:
            self._start(self._carry_out(session, commands, message.configure))
        self._reports.flush_news(session)

    def _pass_on(self, session: RouterSession, usage: wire.RouterUsage) -> None:
        """Lets the other routers know what owners of API keys have used on one."""
        news = wire.AttachResponse(usage=[self._usage.take(session.router_id, usage, self._clock())])
        for other in self._sessions.connected():
            if other is not session:
                other.send(news)

    async def _carry_out(
        self, session: RouterSession, commands: list[core_messages.Command], configure: wire.Configure
    ) -> None:
        try:
            await self._commands.carry_out(session, commands, configure)
        finally:
            self._reports.flush_news(session)

    # --- from the EngineCore ---------------------------------------------------------------------------------------

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
        unread = take_tokens(outputs, self._sessions, now_s)
        if unread:
            releases: list[core_messages.Command] = [core_messages.ReleaseCommand(request_id=name) for name in unread]
            self._start(self._call(releases))
        report = find_report(outputs)
        iteration = None
        if report is not None:
            iteration = report.iteration
            self._take_report(report, now_s)
        has_submits = report is not None and bool(report.last_submit_numbers)
        self._reports.flush_due(now_s, iteration, has_submits=has_submits)

    def _take_report(self, report: core_messages.SchedulerReport, now_s: float) -> None:
        self._reports.load, self._reports.taken_s = report.load, now_s
        if report.iteration is not None:
            self.counters.num_iterations += 1
            self.counters.iteration_s += report.iteration.duration_s
        take_report(report, self._sessions, now_s)

    # --- the clock -----------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Sends idle reports and ends leases, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            expired = self.tick(self._clock())
            if expired:
                await self._client.abort_requests_async(expired)

    def tick(self, now_s: float) -> list[str]:
        """Does what is due; returns the core ids of requests whose lease is over."""
        silence_s = IDLE_REPORT_S - TICK_S / 2
        if min(now_s - self._reports.taken_s, now_s - self._last_poll_s) >= silence_s and not self._is_polling:
            self._last_poll_s, self._is_polling = now_s, True
            self._start(self._poll())
        self._reports.flush_silent(now_s, silence_s)
        self._usage.sweep(now_s)
        return self._sessions.end_leases(now_s - self._lease_s, now_s - self._resume_timeout_s)

    async def _poll(self) -> None:
        """Reads the load of an engine that computes nothing: blocks come back and grants lapse without iterations."""
        try:
            for answer in await self._commands.call([core_messages.ReadLoadCommand()]):
                if isinstance(answer, core_messages.SchedulerLoad):
                    self._reports.load = answer
                elif isinstance(answer, core_messages.CompilingAnswer):
                    # No iteration is due, so that routers must not take the engine for one that hangs.
                    self._reports.load, self._reports.taken_s = answer.load, self._clock()
        finally:
            self._is_polling = False

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """The outermost frame of each task: a failure costs its commands, not the engine."""
        try:
            await work
        except Exception:
            # vLLM's client raises a plain Exception for whatever goes wrong in the EngineCore.
            logger.exception("the EngineCore did not carry out a batch of commands")

    async def _call(self, commands: list[core_messages.Command]) -> None:
        await self._commands.call(commands)

    # --- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Tells the routers and the EngineCore that this engine drains; requests leave or end from now on."""
        self._reports.is_draining = True
        now_s = self._clock()
        for session in self._sessions:
            self._reports.flush(session, now_s)
        await self._start(self._call([self._plan.leave()]))

    async def close(self, fault: str = "", timeout_s: float = 1.0) -> None:
        """Ends all streams after what waits in them.

        Args:
            fault: Why, when the engine is about to die.
            timeout_s: Longest wait for routers to read.
        """
        streams = [session.stream for session in self._sessions.connected() if session.stream is not None]
        for stream in streams:
            if fault:
                stream.send(wire.AttachResponse(fault=fault))
            stream.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for stream in streams:
                    await stream.wait_written()
