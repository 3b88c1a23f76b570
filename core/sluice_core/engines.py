"""The engines as one router knows them: reports plus its own placements since.

``EngineTable`` owns the state; ``report``, ``record_placement`` and the other methods are the only writers. Engines
that can take a prefill stand in ``order``: immutable ``Entry`` tuples, ascending by queued prefill tokens, P-heavy
first among equals. An entry is replaced, never changed, so a decision record is a copy of pointers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sluice_core.latency import LatencyModel
    from sluice_core.records import EngineId, EngineLoad, IterationShape, RequestId, Role


class EngineSpec(NamedTuple):
    """What an engine says about itself in its first message.

    Args:
        block_size_tokens: Tokens per KV block.
        kv_bytes_per_token: Bytes of KV cache per token.
        max_num_seqs: Most running requests.
        max_batch_tokens: Largest chunk size that it can run.
    """

    block_size_tokens: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_batch_tokens: int


class EngineState:
    """One engine; mutable, changed by ``EngineTable`` only. Read it freely.

    Attributes:
        engine_id: The engine.
        spec: What it is.
        role: Role in force.
        chunk_size_tokens: Chunk size in force.
        is_draining: Takes nothing new.
        load: Last report.
        latency: Its latency model.
        queued_prefill_tokens: Reported queue plus own placements since.
        free_at_s: When that queue is empty, on the caller's clock.
        in_flight: Own placements that no report includes yet, oldest first.
        reserved_kv_blocks: KV blocks that queued prompts and own placements will take.
        pending_grants: Blocks asked for and not yet answered, by grant id.
        room_tokens: Prefill room beside the reported decodes.
    """

    engine_id: EngineId
    spec: EngineSpec
    role: Role
    chunk_size_tokens: int
    is_draining: bool
    load: EngineLoad
    latency: LatencyModel
    queued_prefill_tokens: int
    free_at_s: float
    reserved_kv_blocks: int
    pending_grants: dict[int, int]
    room_tokens: int


class EngineTable:
    """All engines that this router may use.

    Args:
        make_latency_model: Makes the model of a new engine; ``OnlineLatencyModel`` by default.
    """

    def __init__(self, make_latency_model: Callable[[], LatencyModel] | None = None) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, engine_id: EngineId) -> bool:
        raise NotImplementedError

    def __iter__(self) -> Iterator[EngineState]:
        raise NotImplementedError

    def __getitem__(self, engine_id: EngineId) -> EngineState:
        raise NotImplementedError

    @property
    def are_roles_void(self) -> bool:
        """True when all engines that do not drain have one chunk size: no transfer, no flow."""
        raise NotImplementedError

    def add(self, engine_id: EngineId, spec: EngineSpec, *, role: Role, chunk_size_tokens: int) -> None:
        """Add an engine; it takes placements from its first report on.

        Raises:
            ValueError: It is in the table already.
        """
        raise NotImplementedError

    def remove(self, engine_id: EngineId) -> None:
        """Forget an engine and everything placed on it. Unknown ones are ignored."""
        raise NotImplementedError

    def configure(self, engine_id: EngineId, *, role: Role, chunk_size_tokens: int, is_draining: bool = False) -> None:
        """Put an acknowledged role, chunk size and drain flag in force."""
        raise NotImplementedError

    def report(self, engine_id: EngineId, load: EngineLoad, now: float) -> None:
        """Take a load report: drops the placements it includes, adds the rest to its sums.

        Args:
            engine_id: Who reports.
            load: The report.
            now: When it was received, in seconds.
        """
        raise NotImplementedError

    def observe_iteration(self, engine_id: EngineId, shape: IterationShape, duration_s: float) -> None:
        """Fit the engine's latency model to a measured iteration; call it before the ``report`` of the same message."""
        raise NotImplementedError

    def record_placement(
        self,
        engine_id: EngineId,
        request_id: RequestId,
        now: float,
        *,
        tokens: int,
        execute_s: float,
        is_recovery: bool,
    ) -> None:
        """Count a prefill that was just placed; placement policies call it themselves.

        Args:
            engine_id: Where it goes.
            request_id: The request.
            now: Seconds on the caller's clock.
            tokens: Prompt tokens to compute there.
            execute_s: E, in seconds.
            is_recovery: Counts against the cap on recoveries.
        """
        raise NotImplementedError

    def mark_submitted(self, engine_id: EngineId, request_id: RequestId, submit_number: int) -> None:
        """Note under which number a placement was sent; a report that includes the number drops it."""
        raise NotImplementedError

    def cancel_placement(self, engine_id: EngineId, request_id: RequestId, now: float) -> None:
        """Forget a placement that was not sent, or was aborted before a report included it. Unknown ones are ignored."""
        raise NotImplementedError

    def record_grant_request(self, engine_id: EngineId, grant_id: int, num_blocks: int) -> None:
        """Count blocks asked for on a target until its answer, so that moves of one tick spread."""
        raise NotImplementedError

    def record_grant_answer(self, engine_id: EngineId, grant_id: int) -> None:
        """Stop counting: granted blocks are in the target's reports from now on. Unknown ones are ignored."""
        raise NotImplementedError
