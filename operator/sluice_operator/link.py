"""The control plane's link to one router: pushes the newest plan, follows its status.

The link is level-triggered: whenever a router answers with an older generation than the newest plan's, it is pushed
again. A router that restarts, or that was away, therefore catches up by itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from sluice.v1 import control_pb2, control_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice.v1 import plan_pb2

RETRY_S = 0.25
POLL_S = 10.0
PUSH_TIMEOUT_S = 5.0
# A local router that starts is found at once: gRPC's own back-off grows to minutes.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 100),
)


class RouterLink:
    """One router's control port.

    Args:
        name: The router, for people.
        address: host:port of its control server.
        report: Takes a line for people.
        on_status: Called when ``status`` has changed; with the link down it is None.
    """

    def __init__(
        self, name: str, address: str, *, report: Callable[[str], None], on_status: Callable[[], None]
    ) -> None:
        self.name = name
        self.status: control_pb2.GetStatusResponse | None = None
        self._address = address
        self._report = report
        self._on_status = on_status
        self._plan: plan_pb2.Plan | None = None
        self._refused_generation = 0
        self._refusal = ""
        self._push = asyncio.Event()

    @property
    def generation(self) -> int:
        """Generation in force there; 0 if unknown."""
        return self.status.generation if self.status else 0

    @property
    def refusal(self) -> str:
        """Why the router refused the newest plan; empty when it did not."""
        is_refused = self._plan is not None and self._plan.generation == self._refused_generation
        return self._refusal if is_refused else ""

    def offer(self, plan: plan_pb2.Plan) -> None:
        """Sets the newest plan; it is pushed at once, and again until it is in force."""
        self._plan = plan
        self._push.set()

    async def run(self) -> None:
        """Keeps the link until cancelled."""
        async with (
            grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel,
            asyncio.TaskGroup() as group,
        ):
            stub = control_pb2_grpc.ControlStub(channel)
            group.create_task(self._push_plans(stub))
            group.create_task(self._follow_status(stub))

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
                self._report(f"{self.name} refused plan {plan.generation}: {answer.error}")

    async def _follow_status(self, stub: control_pb2_grpc.ControlAsyncStub) -> None:
        while True:
            version = self.status.version if self.status else 0
            request = control_pb2.GetStatusRequest(after_version=version, timeout_s=POLL_S)
            try:
                self.status = await stub.GetStatus(request, timeout=POLL_S + PUSH_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                self._lose()
                await asyncio.sleep(RETRY_S)
                continue
            if self._plan is not None and self.status.generation != self._plan.generation:
                self._push.set()
            self._on_status()

    def _lose(self) -> None:
        self._refused_generation = 0  # a router that starts anew may take what its predecessor refused
        if self.status is not None:
            self.status = None
            self._on_status()


async def ask_status(address: str, timeout_s: float = 2.0) -> control_pb2.GetStatusResponse | None:
    """Asks a router for its status once.

    Args:
        address: host:port of its control server.
        timeout_s: Longest wait, in seconds.

    Returns:
        Its answer; None when it does not answer.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        try:
            return await stub.GetStatus(control_pb2.GetStatusRequest(after_version=0), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return None
