"""Fetches a request's decision log from the router that served it."""

from __future__ import annotations

import asyncio
import urllib.parse
from typing import TYPE_CHECKING, Any

import aiohttp

from sluice_cli.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_cli.local_cluster.cluster_status import RouterStatusRow

TIMEOUT = aiohttp.ClientTimeout(total=5)


class UnknownRequestError(CommandError):
    """No router knows the request."""


async def fetch_decision_log(routers: Sequence[RouterStatusRow], request_id: str, api_key: str = "") -> dict[str, Any]:
    """Fetches what a request's router decided about it, and when.

    Args:
        routers: The routers.
        request_id: The router's id (x-request-id in the answer's headers) or the client's own.
        api_key: For routers that ask for one.

    Raises:
        UnknownRequestError: None of them knows it, or the key is not valid.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(timeout=TIMEOUT, headers=headers) as session:
        answers = await asyncio.gather(*(_ask(session, router, request_id) for router in routers))
    for answer in answers:
        if answer:
            return answer
    asked = ", ".join(router.name for router in routers) or "none"
    raise UnknownRequestError(
        f"no router knows request {request_id!r} (routers asked: {asked}); routers keep the last few thousand decisions"
    )


async def _ask(session: aiohttp.ClientSession, router: RouterStatusRow, request_id: str) -> dict[str, Any] | None:
    try:
        # An id is one segment of the path, whatever it holds.
        url = f"{router.metrics_url}/debug/requests/{urllib.parse.quote(request_id, safe='')}"
        async with session.get(url) as response:
            if response.status == 401:
                raise UnknownRequestError(
                    f"{router.name} asks for a valid API key; pass --api-key or set SLUICE_API_KEY"
                )
            if response.status != 200:
                return None
            log: dict[str, Any] = await response.json()
            return log
    except (aiohttp.ClientError, TimeoutError):
        return None
