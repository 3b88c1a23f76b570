"""A steady load on emulated engines, whose shape a test may change. Every answer must be complete and exact."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from workload import Request, make_prompt

from sluice_engine.emulation.emulated_tokens import choose_token, hash_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from cluster import Client


class Shape(NamedTuple):
    """Shape of the requests.

    Args:
        prompt_tokens: Length of prompts.
        output_tokens: Length of answers.
        rate_rps: Requests per second.
    """

    prompt_tokens: int
    output_tokens: int
    rate_rps: float


class Load:
    """Sends requests at a steady rate, and checks every answer.

    Args:
        clients: Connections, used in turn.
        shape: Shape of the first requests; tests may set ``shape`` at any time.
        model: Folder of the model that the engines emulate.
    """

    def __init__(self, clients: Sequence[Client], shape: Shape, model: Path) -> None:
        self._model = model
        self._clients = clients
        self._is_over = asyncio.Event()
        self.shape = shape
        self.fared: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Load]:
        """Sends requests while the block runs, then waits for the last answers. A wrong answer ends the block."""
        async with asyncio.TaskGroup() as streams:
            streams.create_task(self._send(streams))
            try:
                yield self
            finally:
                self._is_over.set()

    async def _send(self, streams: asyncio.TaskGroup) -> None:
        rng = random.Random(1)
        for number, client in enumerate(itertools.cycle(self._clients)):
            shape = self.shape
            request = make_request(f"load-{number}", shape, rng)
            streams.create_task(self._ask(client, request))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), rng.expovariate(shape.rate_rps))
                return

    async def _ask(self, client: Client, request: Request) -> None:
        result = await client.generate(request)
        assert result.token_ids == expect_tokens(request, self._model), f"{request.name} broke"
        self.fared["exact"] += 1
        self.fared["moved"] += result.num_hand_offs > 0


def make_request(name: str, shape: Shape, rng: random.Random) -> Request:
    """Makes a request of a shape, with a prompt of its own."""
    sampling: dict[str, Any] = {"max_tokens": shape.output_tokens, "ignore_eos": True, "temperature": 0.0}
    return Request(name=name, prompt_token_ids=make_prompt(shape.prompt_tokens, rng), sampling=sampling)


def expect_tokens(request: Request, model: Path) -> list[int]:
    """Computes the answer of an emulated engine.

    Args:
        request: The request.
        model: Folder of the model that the engine emulates.
    """
    config = json.loads((model / "config.json").read_text())
    prompt, eos = request.prompt_token_ids, frozenset({int(config["eos_token_id"])})
    first, prompt_hash = len(prompt), hash_prompt(prompt)
    return [
        choose_token(prompt_hash, position, config["vocab_size"], eos)
        for position in range(first, first + request.sampling["max_tokens"])
    ]
