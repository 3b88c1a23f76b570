"""A request's story as its router tells it: every decision, with candidates, estimates and the choice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

TIMEOUT = aiohttp.ClientTimeout(total=5)


class UnknownRequestError(Exception):
    """No router knows the request."""


async def fetch_story(urls: Sequence[str], request_id: str) -> dict[str, Any]:
    """Asks each router for a request.

    Args:
        urls: The routers' OpenAI APIs.
        request_id: The router's id (x-request-id in the answer's headers) or the client's own.

    Raises:
        UnknownRequestError: None of them knows it.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        answers = await asyncio.gather(*(_ask(session, url, request_id) for url in urls))
    for answer in answers:
        if answer:
            return answer
    routers = ", ".join(urls) or "none"
    raise UnknownRequestError(
        f"no router knows request {request_id!r} (asked: {routers}); routers keep the last few thousand decisions"
    )


async def _ask(session: aiohttp.ClientSession, url: str, request_id: str) -> dict[str, Any] | None:
    try:
        async with session.get(f"{url}/debug/requests/{request_id}") as response:
            if response.status != 200:
                return None
            story: dict[str, Any] = await response.json()
            return story
    except (aiohttp.ClientError, TimeoutError):
        return None


def make_story(story: dict[str, Any]) -> Group:
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
