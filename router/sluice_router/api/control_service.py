"""``sluice.v1.Control``: plans in, status out, moves by hand; for the operator or the launcher."""

from __future__ import annotations

import asyncio

import grpc

from sluice.v1 import control_pb2, control_pb2_grpc
from sluice_core.records import EngineId
from sluice_router.errors import PlanRefusedError
from sluice_router.scheduling.router import Router

# Longest wait of a long poll (control.proto).
MAX_POLL_S = 60.0
SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


class ControlService(control_pb2_grpc.ControlServicer):
    """The service.

    Args:
        router: What it controls.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._news = asyncio.Event()
        router.on_change(self._tell)

    async def ApplyPlan(  # noqa: N802 - the name is the wire's
        self,
        request: control_pb2.ApplyPlanRequest,
        context: grpc.aio.ServicerContext[control_pb2.ApplyPlanRequest, control_pb2.ApplyPlanResponse],
    ) -> control_pb2.ApplyPlanResponse:
        """Applies a plan whole, or says why not."""
        del context
        error = ""
        try:
            self._router.apply_plan(request.plan)
        except PlanRefusedError as refusal:
            error = str(refusal)
        plan = self._router.state.active.plan
        generation = plan.generation if plan is not None else 0
        return control_pb2.ApplyPlanResponse(generation=generation, is_applied=not error, error=error)

    async def GetStatus(  # noqa: N802 - the name is the wire's
        self,
        request: control_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[control_pb2.GetStatusRequest, control_pb2.GetStatusResponse],
    ) -> control_pb2.GetStatusResponse:
        """Answers when the state is newer than what the caller has, or its time is up."""
        del context
        timeout_s = min(max(0.0, request.timeout_s), MAX_POLL_S)
        if request.after_version:
            try:
                async with asyncio.timeout(timeout_s):
                    # A version from before this router's start is not one of ours.
                    while self._router.state.status.version == request.after_version:
                        await self._news.wait()
            except TimeoutError:
                pass
        return self._router.describe()

    async def Move(  # noqa: N802 - the name is the wire's
        self,
        request: control_pb2.MoveRequest,
        context: grpc.aio.ServicerContext[control_pb2.MoveRequest, control_pb2.MoveResponse],
    ) -> control_pb2.MoveResponse:
        """Begins a move, or says why not."""
        del context
        reason = self._router.move(request.request_id, EngineId(request.engine_id))
        return control_pb2.MoveResponse(is_started=not reason, reason=reason)

    def _tell(self) -> None:
        """Wakes every poll; the next ones wait for the next change."""
        self._news.set()
        self._news = asyncio.Event()
