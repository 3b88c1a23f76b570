"""One request that is moved from engine to engine, and what each hop cost it.

Where a hop lies in the stream is not guessed from the gaps: the router's record of the request says after how many
output tokens the source handed it off, so the pause is the gap before the token of that index.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.local_cluster.client import TokenStream

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from benchmarks.local_cluster.client import BenchmarkClient

# Tokens before the first hop and after each one; the plain gaps of a request lie among them.
HOLD_TOKENS = 12
# Tokens until it is asked whether a move has come to its end; the request runs on meanwhile.
ASKING_TOKENS = 4
# Output of a request at most; it is cut off after its last hop. Long: on a busy machine a grant takes many of the
# source's iterations, and the request runs on meanwhile.
MOST_OUTPUT_TOKENS = 4096
# Gaps from a hop on that are not plain: the hop itself, and a first step that the target may have shared with it.
HOP_GAPS = 2
# Within the tiny model's vocabulary, above its special tokens.
TOKEN_IDS = range(3, 2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One hand-off, as the client saw it.

    Args:
        source: Engine that handed off.
        target: Engine that went on.
        context_tokens: Prompt and output at the hand-off.
        begin_s: Stamp of the last token from the source.
        end_s: Stamp of the first token from the target.
        move_s: Grant asked for to first token from the target, by the router's clock.
        target_decodes: Decodes on the target when the move was asked for, by its newest report.
        target_queued_tokens: Prefill tokens queued there, by the same report.
    """

    source: str
    target: str
    context_tokens: int
    begin_s: float
    end_s: float
    move_s: float
    target_decodes: int
    target_queued_tokens: int

    @property
    def pause_s(self) -> float:
        """Last token from the source to first token from the target, both at the client."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What came of a request that was moved along a route.

    Args:
        hops: In order; a move that was refused or given up is not among them.
        plain_gaps_s: Gaps between its tokens that have no hop near them.
        num_missing: Moves asked for that did not come to a hop.
        token_ids: Its output.
    """

    hops: list[Hop]
    plain_gaps_s: list[float]
    num_missing: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A move that was asked for, and its target's newest report then."""

    target: str
    decodes: int
    queued_tokens: int


def draw_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Draws a prompt of its own, so that no prefix cache holds a block of it."""
    return rng.choices(TOKEN_IDS, k=num_tokens)


async def walk(
    client: BenchmarkClient, prompt: Sequence[int], limit_tokens: int, choose_route: Callable[[str], list[str]]
) -> Walk:
    """Runs a request and moves it along a route.

    Args:
        client: Of the router.
        prompt: Its prompt.
        limit_tokens: Prompt and output that the model takes.
        choose_route: Chooses the engines to move to, in order, by the one that the prefill ran on.

    Raises:
        StreamFailedError: The request failed.
    """
    stream = TokenStream()
    async with asyncio.TaskGroup() as group:
        max_tokens = min(MOST_OUTPUT_TOKENS, limit_tokens - len(prompt))
        reader = group.create_task(client.generate(stream, prompt, max_tokens))
        asked = await _ask_for_moves(client, stream, choose_route)
        # What is left of it is of no use.
        reader.cancel()
    return read_walk(stream, len(prompt), asked, await client.explain(stream.request_id))


async def _ask_for_moves(
    client: BenchmarkClient, stream: TokenStream, choose_route: Callable[[str], list[str]]
) -> list[Asked]:
    """Asks for one move after the other; the stream is read meanwhile, so that no stamp waits for an answer."""
    asked: list[Asked] = []
    if not await stream.wait_tokens(1):
        return asked
    for target in choose_route(await find_engine(client, stream.request_id)):
        if not await stream.wait_more(HOLD_TOKENS):
            break
        status = await client.read_status()
        engine = next(engine for engine in status.engines if engine.engine_id == target)
        asked.append(Asked(target=target, decodes=engine.running_decodes, queued_tokens=engine.queued_prefill_tokens))
        await move_for_sure(client, stream, target)
    await stream.wait_more(HOLD_TOKENS)
    return asked


async def move_for_sure(client: BenchmarkClient, stream: TokenStream, target: str) -> bool:
    """Asks for a move until the request runs on the target; False when it ended before.

    Asking again is also the way to see how the move stands: it is refused while one is under way, and with
    ``same_engine`` once the target owns the request.
    """
    while await client.move(stream.request_id, target) != "same_engine":
        if not await stream.wait_more(ASKING_TOKENS):
            return False
    return True


async def find_engine(client: BenchmarkClient, request_id: str) -> str:
    """Finds the engine that a request had its first token from."""
    events = await client.explain(request_id)
    return next(str(event["engine"]) for event in events if event["event"] == "first_token")


def read_walk(
    stream: TokenStream, prompt_tokens: int, asked: Sequence[Asked], events: Sequence[dict[str, Any]]
) -> Walk:
    """Finds the hops in a stream.

    Args:
        stream: The stream, at its end.
        prompt_tokens: Length of the prompt.
        asked: Moves asked for, in order.
        events: The router's record of the request.
    """
    hops: list[Hop] = []
    token_times_s = stream.token_times_s
    pending = list(asked)
    hop_indexes: set[int] = set()
    for left, arrived in find_moves(events):
        index = int(left["output_tokens"])
        while pending and pending[0].target != left["target"]:
            pending.pop(0)
        if not pending or not 0 < index < len(token_times_s):
            break
        target = pending.pop(0)
        hop_indexes.update(range(index, index + HOP_GAPS))
        hops.append(
            Hop(
                source=left["source"],
                target=left["target"],
                context_tokens=prompt_tokens + index,
                begin_s=token_times_s[index - 1],
                end_s=token_times_s[index],
                move_s=float(arrived["duration_s"]),
                target_decodes=target.decodes,
                target_queued_tokens=target.queued_tokens,
            )
        )
    plain = [
        token_times_s[index] - token_times_s[index - 1]
        for index in range(1, len(token_times_s))
        if index not in hop_indexes
    ]
    return Walk(hops=hops, plain_gaps_s=plain, num_missing=len(asked) - len(hops), token_ids=stream.token_ids)


def find_moves(events: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs each hand-off with its arrival; one without (the pull failed and something else followed) is left out."""
    pairs = []
    left: dict[str, Any] | None = None
    for event in events:
        if event["event"] == "handed_off":
            left = event
        elif event["event"] == "moved" and left is not None and left["target"] == event["target"]:
            pairs.append((left, event))
            left = None
    return pairs
