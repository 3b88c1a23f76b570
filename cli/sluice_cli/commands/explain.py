"""A request's story as its router tells it: every decision, with candidates, estimates and the choice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sluice.certificates import make_pinned_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from sluice_cli.local_cluster.cluster_status import RouterStatusRow

TIMEOUT = aiohttp.ClientTimeout(total=5)


class UnknownRequestError(Exception):
    """No router knows the request."""


async def fetch_decision_log(routers: Sequence[RouterStatusRow], request_id: str, api_key: str = "") -> dict[str, Any]:
    """Asks each router for a request.

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
    asked = ", ".join(router.url for router in routers) or "none"
    raise UnknownRequestError(
        f"no router knows request {request_id!r} (asked: {asked}); routers keep the last few thousand decisions"
    )


async def _ask(session: aiohttp.ClientSession, router: RouterStatusRow, request_id: str) -> dict[str, Any] | None:
    trust = make_pinned_context(Path(router.front_tls)) if router.front_tls else True
    try:
        async with session.get(f"{router.url}/debug/requests/{request_id}", ssl=trust) as response:
            if response.status == 401:
                raise UnknownRequestError(f"{router.url} asks for a valid API key; pass --api-key or SLUICE_API_KEY")
            if response.status != 200:
                return None
            story: dict[str, Any] = await response.json()
            return story
    except (aiohttp.ClientError, TimeoutError):
        return None


def render_decision_log(story: dict[str, Any]) -> Group:
    """Shows a story: one line per event, a table of candidates under each placement."""
    parts: list[RenderableType] = [Text(f"request {story['request_id']}", style="bold")]
    for event in story["events"]:
        parts.append(Text(f"{event['at_s']:10.4f} s  {describe_event(event)}"))
        if event.get("candidates"):
            parts.append(Padding(_make_candidates(event), (0, 0, 0, 14)))
    return Group(*parts)


def describe_event(event: dict[str, Any]) -> str:
    """One line about an event."""
    if event["event"] == "placement":
        decision = event["decision"]
        if decision["kind"] == "Place":
            return (
                f"placement: {decision['engine_id']} ({decision['reason']}), "
                f"predicted TTFT {1000 * decision['predicted_ttft_s']:.0f} ms"
            )
        return f"placement: {decision['kind'].lower()} ({decision['reason']})"
    facts = ", ".join(
        f"{name} {_show(value)}" for name, value in event.items() if name not in ("event", "at_s") and value != ""
    )
    return f"{event['event'].replace('_', ' ')}: {facts}"


def _make_candidates(event: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("candidate", "role", "queued tokens", "queue ms", "execute ms", "transfer ms", "verdict"):
        table.add_column(name, justify="left" if name in ("candidate", "role", "verdict") else "right")
    chosen = event["decision"].get("engine_id")
    for candidate in event["candidates"]:
        table.add_row(
            candidate["engine_id"],
            candidate["role"],
            str(candidate["queued_prefill_tokens"]),
            *(f"{1000 * candidate[part]:.1f}" for part in ("queue_s", "execute_s", "transfer_s")),
            candidate["reason"] + (" (chosen)" if candidate["engine_id"] == chosen else ""),
        )
    return table


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
