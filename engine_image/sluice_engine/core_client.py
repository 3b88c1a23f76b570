"""What the server needs of vLLM's side: a client of the EngineCore, and requests for it.

Both are given to the server, so that it can be tested without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2 as wire
    from sluice_engine.core_messages import RequestExtras


class CoreClient(Protocol):
    """The part of vLLM's ``AsyncMPClient`` that is used."""

    async def get_output_async(self) -> Any:
        """One iteration's ``EngineCoreOutputs``."""

    async def add_request_async(self, request: Any) -> None:
        """Sends an ``EngineCoreRequest``."""

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Sends an abort."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Calls a method of the EngineCore between two iterations."""


class RequestBuilder(Protocol):
    """Makes the EngineCore's request out of a submit."""

    def build(self, core_id: str, submit: wire.Submit, extras: RequestExtras) -> Any:
        """Makes vLLM's request.

        Raises:
            SubmitRefusedError: Names the field, the value and the limit.
        """
