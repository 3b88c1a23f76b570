"""The control plane's connection to one router: pushes the newest plan and follows the router's status.

It is level-triggered: whenever a router reports an older generation than the newest plan's, the plan is pushed again.
So a router that restarts or was unreachable catches up.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from sluice.grpc_credentials import WITHOUT_PROXY, describe_distrust, make_channel
from sluice.v1 import control_pb2, control_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice.certificate_rotation import CertificateFolder
    from sluice.certificates import Certificates
    from sluice.v1 import plan_pb2

RETRY_S = 0.25
# Certificates are renewed weeks before they end.
RENEWAL_S = 1.0
POLL_S = 10.0
PUSH_TIMEOUT_S = 5.0
# So many equal TLS errors in a row are reported.
MAX_TLS_ERRORS = 8
# A router that starts is reached at once; gRPC's default back-off grows to minutes.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTls:
    """TLS of control ports.

    Args:
        certificates: Our own; a task of the caller refreshes them.
        server_name: Name that the router's certificate must be for.
    """

    certificates: CertificateFolder
    server_name: str


class RouterConnection:
    """One router's control port.

    Args:
        name: The router, in messages.
        address: host:port of its control server.
        log: Takes a message for users.
        on_status: Called when ``status`` has changed; None while the router does not answer.
        tls: How it is encrypted; None: it is not.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        log: Callable[[str], None],
        on_status: Callable[[], None],
        tls: ControlTls | None = None,
    ) -> None:
        self.name = name
        self.status: control_pb2.GetStatusResponse | None = None
        self._address = address
        self._tls = tls
        self._log = log
        self._on_status = on_status
        self._plan: plan_pb2.Plan | None = None
        self._refused_generation = 0
        self._refusal = ""
        self._push = asyncio.Event()
        self._tls_error = ""
        self._num_tls_errors = 0

    @property
    def generation(self) -> int:
        """Generation in force there; 0 if unknown."""
        return self.status.generation if self.status else 0

    @property
    def refusal(self) -> str:
        """Why the router refused the newest plan, or cannot be trusted with it; empty when it did not."""
        if self._num_tls_errors >= MAX_TLS_ERRORS:
            return f"the connection is not trusted: {self._tls_error}"
        is_refused = self._plan is not None and self._plan.generation == self._refused_generation
        return self._refusal if is_refused else ""

    def set_plan(self, plan: plan_pb2.Plan) -> None:
        """Sets the newest plan; it is pushed at once, and again until it is in force."""
        self._plan = plan
        self._push.set()

    async def run(self) -> None:
        """Keeps the connection until cancelled."""
        while True:
            # A channel keeps the certificate that it was made with.
            used = self._tls.certificates.current if self._tls else None
            async with open_channel(self._address, self._tls, CHANNEL_OPTIONS) as channel, asyncio.TaskGroup() as group:
                stub = control_pb2_grpc.ControlStub(channel)
                tasks = [group.create_task(self._push_plans(stub)), group.create_task(self._follow_status(stub))]
                await self._wait_for_another(used)
                for task in tasks:
                    task.cancel()
            # Requests that were cancelled are sent again on the new channel.
            self._push.set()

    async def _wait_for_another(self, used: Certificates | None) -> None:
        """Waits until there is another certificate than the one in use; for ever without any."""
        while self._tls is None or self._tls.certificates.current is used:  # noqa: ASYNC110 - weeks
            await asyncio.sleep(RENEWAL_S)

    async def _push_plans(self, stub: control_pb2_grpc.ControlAsyncStub) -> None:
        while True:
            await self._push.wait()
            self._push.clear()
            plan = self._plan
            if plan is None or plan.generation in (self.generation, self._refused_generation):
                continue
            try:
                answer = await stub.ApplyPlan(control_pb2.ApplyPlanRequest(plan=plan), timeout=PUSH_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue  # it is not up yet, or gone: the next status that names an older generation pushes again
            if not answer.is_applied and answer.generation < plan.generation:
                self._refused_generation, self._refusal = plan.generation, answer.error
                self._log(f"{self.name} refused plan {plan.generation}: {answer.error}")

    async def _follow_status(self, stub: control_pb2_grpc.ControlAsyncStub) -> None:
        while True:
            version = self.status.version if self.status else 0
            request = control_pb2.GetStatusRequest(after_version=version, timeout_s=POLL_S)
            try:
                self.status = await stub.GetStatus(request, timeout=POLL_S + PUSH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._drop_status()
                self._record_tls_error(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._tls_error, self._num_tls_errors = "", 0
            if self._plan is not None and self.status.generation != self._plan.generation:
                self._push.set()
            self._on_status()

    def _record_tls_error(self, error: grpc.aio.AioRpcError) -> None:
        """Counts TLS errors: a router that starts or stops may cause the same error once or twice."""
        found = describe_distrust(error, self._tls.server_name) if self._tls else ""
        self._num_tls_errors = self._num_tls_errors + 1 if found and found == self._tls_error else int(bool(found))
        self._tls_error = found
        if self._num_tls_errors == MAX_TLS_ERRORS:
            self._log(f"{self.name}: {self.refusal}")

    def _drop_status(self) -> None:
        self._refused_generation = 0  # a router that restarts may accept what it refused before
        if self.status is not None:
            self.status = None
            self._on_status()


def open_channel(address: str, tls: ControlTls | None, options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
    """Opens a channel to a control port."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[WITHOUT_PROXY, *options])
    return make_channel(address, tls.certificates.current, tls.server_name, options)


async def fetch_status(
    address: str, timeout_s: float = 2.0, *, tls: ControlTls | None = None
) -> control_pb2.GetStatusResponse | None:
    """Fetches a router's status once.

    Args:
        address: host:port of its control server.
        timeout_s: Longest wait, in seconds.
        tls: How it is encrypted; None: it is not.

    Returns:
        Its answer; None when it does not answer.
    """
    async with open_channel(address, tls) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            return await stub.GetStatus(control_pb2.GetStatusRequest(after_version=0), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return None
