"""Shows a request's decision log: every decision, with candidates, estimates and the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType


_PARTS = ("queue_s", "execute_s", "transfer_s")
_MILLISECONDS = ("queue ms", "execute ms", "transfer ms", "total ms")
LEGEND = (
    "total: estimated wait for the first token from here on, had this engine been chosen:\n"
    "prompts before it (queue), its own prompt less the cached tokens (execute), and the move of its KV (transfer)\n"
    "of the engines that are in time, Sluice takes the one that is done first, EcoServe the one whose turn it is, and\n"
    "every other strategy the one with the fewest queued tokens, less eight for each cached one"
)
# What each word of a decision means: of candidates, of the choice among them, and of waiting.
MEANINGS = {
    "feasible": "the first token would come within the TTFT objective",
    "ttft": "the first token would come too late for the objective",
    "least_late": "no engine was in time: here it would be done first",
    "random": "no engine was in time: one was drawn, as earlyRejection Random says",
    "unproven": "no engine was in time, but this one's estimate may be wrong, or can only get worse",
    "recovery": "its stream has begun, so that only the next token's time counts",
    "recovery_cap": "other recoveries have the share of each engine that prompts must leave to them",
    "kv": "too few KV blocks are free for the prompt",
    "seats": "every engine with room for its KV runs as many requests as it can",
    "late_binding": "no engine will take a prompt within creditMilliseconds: it waits here, where order still counts",
    "saved_tpot": "a prefill here would outlast what decodes have saved, or the TTFT objective: it waits for a turn",
    "room": "its iterations are full of decodes: no prefill has room",
    "draining": "it hands its requests over and takes no new ones",
    "no_report": "it has not reported its load yet",
    "excluded": "the request failed or was returned there",
    "no_engine": "no engine takes prompts",
    "round_robin": "it was this engine's turn",
    "least_work": "it has the least work",
    "shortest_queue": "it has the shortest queue",
    "split": "two engines compute it in two parts; the prompt begins here",
    "whole": "this engine computes all of it: no split would balance two engines better",
}


def render_decision_log(log: dict[str, Any]) -> Group:
    """Shows a decision log: one line per event, a table of candidates under each placement."""
    parts: list[RenderableType] = [Text(f"request {log['request_id']}", style="bold")]
    for event in log["events"]:
        parts.append(Text(f"{event['at_s']:10.4f} s  {describe_event(event)}"))
        if event.get("candidates"):
            parts.append(
                Padding(Group(_make_candidates(event), Text(_compare(event) + LEGEND, style="dim")), (0, 0, 0, 14))
            )
    words = dict.fromkeys(word for event in log["events"] for word in _list_words(event))
    parts += [Text(f"{word}: {MEANINGS[word]}", style="dim") for word in words if word in MEANINGS]
    return Group(*parts)


def _list_words(event: dict[str, Any]) -> list[str]:
    """Lists the words of a placement that need a legend."""
    if "decision" not in event:
        return []
    return [event["decision"].get("reason", ""), *(candidate["reason"] for candidate in event.get("candidates", ()))]


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
    for name in ("candidate", "role", "queued tokens", "cached tokens", *_MILLISECONDS, "verdict"):
        table.add_column(name, justify="left" if name in ("candidate", "role", "verdict") else "right")
    chosen = event["decision"].get("engine_id")
    for candidate in event["candidates"]:
        table.add_row(
            candidate["engine_id"],
            candidate["role"],
            str(candidate["queued_prefill_tokens"]),
            str(candidate.get("cached_tokens", 0)),
            *(f"{1000 * candidate[part]:.1f}" for part in _PARTS),
            f"{1000 * sum(candidate[part] for part in _PARTS):.1f}",
            candidate["reason"] + (" (chosen)" if candidate["engine_id"] == chosen else ""),
        )
    return table


def _compare(event: dict[str, Any]) -> str:
    """One line about what the choice is estimated to cost beside its alternatives; empty where there are none."""
    totals_ms = {each["engine_id"]: 1000 * sum(each[part] for part in _PARTS) for each in event["candidates"]}
    chosen_ms = totals_ms.pop(event["decision"].get("engine_id"), None)
    if chosen_ms is None or not totals_ms:
        return ""
    best = min(totals_ms, key=lambda engine: totals_ms[engine])
    difference = f"{abs(totals_ms[best] - chosen_ms):.1f} ms {'more' if totals_ms[best] >= chosen_ms else 'less'}"
    return f"chosen: {chosen_ms:.1f} ms; the best of the others, {best}: {totals_ms[best]:.1f} ms, {difference}\n"


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
