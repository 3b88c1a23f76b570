"""The decodes of a simulated engine.

An iteration costs O(finished), never O(batch): all decodes gain one token, so

- a decode ends at an iteration that is known when it joins: ``_ending`` holds the requests of each;
- the context that decode attention reads is a running sum;
- a decode takes a block when its KV fills one, which is every ``block_size_tokens`` iterations: ``_growth`` counts the
  decodes by the remainder at which that happens.
"""

from __future__ import annotations

from collections.abc import Collection

from sluice_core.records import RequestId
from sluice_core.scheduling.decode_set import DecodeSet
from sluice_core.sim.requests import RequestState, SimRequest
from sluice_core.sim.sim_setup import EngineSetup


class DecodeBatch:
    """Decodes of one engine; mutable, changed by its engine only.

    Args:
        setup: What the engine is.

    Attributes:
        iteration: Iterations so far.
        num_decodes: Running decodes.
        context_tokens: Sum of their contexts.
        decodes: The same decodes as flow policies see them.
        paused: Decodes that are left out of the next iteration, or the one under way.
    """

    __slots__ = (
        "_block_size",
        "_decoding",
        "_ending",
        "_growth",
        "context_tokens",
        "decodes",
        "iteration",
        "num_decodes",
        "paused",
    )

    def __init__(self, setup: EngineSetup) -> None:
        self.iteration = 0
        self.num_decodes = 0
        self.paused: list[SimRequest] = []
        self.context_tokens = 0
        self.decodes = DecodeSet(block_size_tokens=setup.block_size_tokens, max_num_seqs=setup.max_num_seqs)
        self.decodes.role = setup.role
        self.decodes.kv_blocks_total = setup.kv_blocks_total
        self._block_size = setup.block_size_tokens
        self._growth: list[int] = [0] * setup.block_size_tokens
        self._ending: dict[int, list[tuple[int, SimRequest]]] = {}
        self._decoding: dict[RequestId, SimRequest] = {}

    def __getitem__(self, request_id: RequestId) -> SimRequest:
        return self._decoding[request_id]

    def list_requests(self) -> Collection[SimRequest]:
        """List the requests that decode, in the order in which they joined."""
        return self._decoding.values()

    def count_growth_blocks(self) -> int:
        """Count the blocks that the decodes take in the next iteration."""
        return self._growth[-self.iteration % self._block_size]

    def is_growing(self, request: SimRequest) -> bool:
        """Say whether a decode takes a block in the next iteration."""
        return (request.prompt_tokens + self.iteration - request.start_iteration - 1) % self._block_size == 0

    def advance(self) -> list[tuple[int, SimRequest]] | None:
        """Give every decode a token.

        Returns:
            Requests that may have their last one now, each with the batch epoch in which that was to be.
        """
        self.iteration += 1
        self.decodes.advance([request.request_id for request in self.paused] if self.paused else ())
        self.context_tokens += self.num_decodes
        if self.paused:
            for request in self.paused:
                self._ending[request.start_iteration + request.output_tokens].remove((request.batch_epoch, request))
                request.start_iteration += 1
                self._note_end(request)
            self.resume()
        ending = self._ending.get(self.iteration)
        if ending is not None:
            del self._ending[self.iteration]
        return ending

    def pause(self, requests: list[SimRequest]) -> None:
        """Leave decodes out of the next iteration; they keep all that they have."""
        self.paused = requests
        for request in requests:
            self._count(request, -1)

    def resume(self) -> None:
        """End the pause of decodes."""
        for request in self.paused:
            self._count(request, 1)
        self.paused = []

    def _count(self, request: SimRequest, by: int) -> None:
        num_tokens = request.prompt_tokens + self.iteration - request.start_iteration
        self.num_decodes += by
        self.context_tokens += by * num_tokens
        self._growth[(num_tokens - 1 - self.iteration) % self._block_size] += by

    def _note_end(self, request: SimRequest) -> None:
        ends_at = request.start_iteration + request.output_tokens
        ending = self._ending.get(ends_at)
        if ending is None:
            self._ending[ends_at] = [(request.batch_epoch, request)]
        else:
            ending.append((request.batch_epoch, request))

    def join(self, request: SimRequest) -> None:
        """Add a request."""
        generated = request.generated_tokens
        request.state = RequestState.DECODING
        request.start_iteration = self.iteration - generated
        self._count(request, 1)
        self._note_end(request)
        self._decoding[request.request_id] = request
        self.decodes.join(
            request.request_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=generated,
            output_tokens_since_reset=generated - request.reset_tokens,
            first_token_s=request.first_token_s,
            tpot_slo_s=request.tpot_slo_s,
            is_moved_in=request.is_moved_in,
            split_tokens=request.split_tokens if request.split_token else 0,
        )

    def leave(self, request: SimRequest, now: float) -> None:
        """Take a request out; its blocks stay used."""
        request.generated_tokens = self.iteration - request.start_iteration
        request.last_token_s = now
        request.batch_epoch += 1
        num_tokens = request.prompt_tokens + request.generated_tokens
        request.num_blocks = -(-(num_tokens - 1) // self._block_size)
        self._count(request, -1)
        del self._decoding[request.request_id]
        self.decodes.leave(request.request_id)

    def check_idle(self) -> None:
        """Assert that nothing is left, and that no sum has drifted."""
        assert not self._decoding
        assert len(self.decodes) == 0
        assert self.num_decodes == self.context_tokens == 0
        assert not any(self._growth)
