"""What else the engines do while a request is handed off: nothing, decodes, or prefills that queue.

Every engine has the same background, so that a request can be measured on its way there and back.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.hand_off.hops import draw_prompt, move_for_sure
from benchmarks.local_cluster.client import TokenStream

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from benchmarks.hand_off.hops import Hop
    from benchmarks.local_cluster.client import BenchmarkClient

DECODE_PROMPT_TOKENS = 64
DECODE_OUTPUT_TOKENS = 1500
PREFILL_PROMPT_TOKENS = 2000
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundLoad:
    """A background.

    Args:
        name: For tables.
        decodes: Decodes that run on each engine. Each has one token per iteration, so they count iterations.
        prefills: Prompts in prefill or its queue, per engine.
    """

    name: str
    decodes: int = 0
    prefills: int = 0


CONDITIONS = (
    BackgroundLoad(name="idle"),
    BackgroundLoad(name="decodes", decodes=4),
    # One decode counts the iterations; of two prompts per engine one at least waits.
    BackgroundLoad(name="prefill queue", decodes=1, prefills=3),
)


class BackgroundError(RuntimeError):
    """A condition did not come up; says how far it came."""


class Background:
    """Keeps a condition up. Mutable: its streams come and go.

    Args:
        client: Of the router.
        condition: What to keep up.
        engine_ids: Engines to keep it up on.
        rng: Draws prompts.
    """

    def __init__(
        self, client: BenchmarkClient, condition: BackgroundLoad, engine_ids: list[str], rng: random.Random
    ) -> None:
        self._client = client
        self._condition = condition
        self._engine_ids = engine_ids
        self._rng = rng
        # The present decode of each of the engine's places, once it is there.
        self._decodes: dict[str, list[TokenStream]] = {engine_id: [] for engine_id in engine_ids}
        self._is_up = asyncio.Event()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keeps the condition up for the length of the block.

        Raises:
            BackgroundError: It does not come up.
        """
        condition = self._condition
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._keep_decode(engine_id))
                for engine_id in self._engine_ids
                for _ in range(condition.decodes)
            ]
            tasks += [
                group.create_task(self._keep_prefill()) for _ in range(condition.prefills * len(self._engine_ids))
            ]
            self._note_decodes()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._is_up.wait()
            except TimeoutError as error:
                present = {engine_id: len(streams) for engine_id, streams in self._decodes.items()}
                raise BackgroundError(
                    f"{condition.decodes} decodes are wanted on each engine; "
                    f"after {START_TIMEOUT_S:g} s there are {present}"
                ) from error
            yield
            for task in tasks:
                task.cancel()

    def count_iterations(self, hop: Hop) -> float | None:
        """Counts the target's iterations during a pause: tokens that a decode there had; None without decodes."""
        counts = [
            bisect_right(stream.token_times_s, hop.end_s) - bisect_right(stream.token_times_s, hop.begin_s)
            for stream in self._decodes[hop.target]
            if stream.token_times_s[0] <= hop.begin_s and not stream.is_done
        ]
        return float(median(counts)) if counts else None

    def _note_decodes(self) -> None:
        if all(len(streams) >= self._condition.decodes for streams in self._decodes.values()):
            self._is_up.set()

    async def _keep_decode(self, engine_id: str) -> None:
        """Keeps one decode on an engine; it is moved there if its prefill ran elsewhere."""
        while True:
            stream = TokenStream()
            async with asyncio.TaskGroup() as group:
                prompt = draw_prompt(self._rng, DECODE_PROMPT_TOKENS)
                group.create_task(self._client.generate(stream, prompt, DECODE_OUTPUT_TOKENS))
                if await self._settle(stream, engine_id):
                    self._decodes[engine_id].append(stream)
                    self._note_decodes()
            if stream in self._decodes[engine_id]:
                self._decodes[engine_id].remove(stream)

    async def _settle(self, stream: TokenStream, engine_id: str) -> bool:
        """Moves a decode to its engine; False when it ended before it was there."""
        return await stream.wait_tokens(1) and await move_for_sure(self._client, stream, engine_id)

    async def _keep_prefill(self) -> None:
        """Keeps one prompt in prefill or its queue; the router places it where the fewest tokens wait."""
        while True:
            prompt = draw_prompt(self._rng, PREFILL_PROMPT_TOKENS)
            await self._client.generate(TokenStream(), prompt, 1)
