"""Prompts that are cut: one engine computes the beginning, its KV goes to another one, which goes on.

The second engine keeps blocks and a seat for the whole prompt from the placement on. The KV goes over the link as it is
computed, or all in the end (``SimOptions.sends_parts``). The token with which the beginning ends is discarded.

Source: DynaServe, sections 3.1 and 4.3. The product asks for room when the first part begins, and prefixes are reused:
neither is simulated, so that prompts are cut only where that is asked for (``DynaServeRules.cuts_prompts``).
"""

from __future__ import annotations

from sluice_core.records import EngineId, MoveCause
from sluice_core.sim.cluster import TRANSFER_END, SimCluster
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.requests import SimRequest


class CutPrompts:
    """The prompts whose second part has not begun; mutable.

    Args:
        cluster: Whose engines these are.

    Attributes:
        num_cut: Prompts that were cut.
    """

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.num_cut = 0
        self._computing: dict[EngineId, list[SimRequest]] = {}

    def begin(self, request: SimRequest, first: SimEngine, second: SimEngine) -> None:
        """Keep room on the second engine; without room there the first one computes all of the request.

        Raises:
            ValueError: Engines that schedule ahead, or that reuse prefixes.
        """
        options = self._cluster.cell.options
        if options.schedules_ahead or options.hash_block_tokens is not None:
            raise ValueError("prompts are cut only where engines schedule in step and reuse no prefixes")
        num_blocks = -(-request.prompt_tokens // second.setup.block_size_tokens)
        num_seats = second.num_incoming + second.count_running()
        if num_blocks > second.free_blocks or num_seats >= second.setup.max_num_seqs or second.is_draining:
            request.split_token = 0
            return
        self.num_cut += 1
        second.reserve(num_blocks)
        request.part_blocks = num_blocks
        self._computing.setdefault(first.engine_id, []).append(request)

    def end_iteration(self, engine: SimEngine) -> None:
        """Send what an iteration has computed of the beginnings."""
        computing = self._computing.get(engine.engine_id)
        if not computing:
            return
        cluster = self._cluster
        parted, engine.parted = engine.parted, []
        still = [request for request in computing if request.is_cut and request.target == engine.engine_id]
        if cluster.cell.options.sends_parts:
            for request in still:
                computed = request.num_computed_tokens
                if request not in parted and computed > request.sent_tokens:
                    cluster.links.send(cluster.now, engine.setup, computed - request.sent_tokens, is_ahead=True)
                    request.sent_tokens = computed
        for request in parted:
            request.source = engine.engine_id
            request.num_moves += 1
            cluster.num_moves[MoveCause.SPLIT] += 1
            left_tokens = request.part_tokens - request.sent_tokens
            cluster.push(cluster.links.send(cluster.now, engine.setup, left_tokens), TRANSFER_END, request)
        self._computing[engine.engine_id] = [request for request in still if request not in parted]

    def arrive(self, request: SimRequest, source: SimEngine | None, second: SimEngine | None) -> None:
        """Let the second engine go on, or place the request again if one of the two has died."""
        if source is not None:
            source.release(request.num_blocks, request.part_tokens, None)
        if source is None or second is None:
            self._cluster.recover(request)
            return
        second.take_part(request)
        self._cluster.start_engine(second)
