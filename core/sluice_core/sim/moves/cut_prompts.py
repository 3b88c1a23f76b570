"""Prompts that are cut: one engine computes the beginning, its KV goes to another one, which goes on.

When the beginning has got its first chunk, the other engine is asked for room: blocks and a seat for the whole prompt.
KV goes over the link as it is computed, or all in the end (``SimOptions.sends_parts``). The token with which the
beginning ends is discarded. Without room by then, the engine is asked once more; in vain, the first one computes the
rest too, and may find the beginning in its blocks.

Here is what follows where engines schedule in step, and who computes a beginning; for the others see ``cut_hand_offs``.

Source: DynaServe, sections 3.1 and 4.3.
"""

from __future__ import annotations

from sluice_core.kv_blocks import blocks_for_tokens
from sluice_core.records import EngineId, MoveCause
from sluice_core.sim.cluster import TRANSFER_END, SimCluster, has_room
from sluice_core.sim.engine.sim_engine import SimEngine
from sluice_core.sim.moves.cut_hand_offs import CutHandOffs
from sluice_core.sim.requests import SimRequest


class CutPrompts:
    """The prompts whose second part has not begun; mutable.

    Args:
        cluster: Whose engines these are.
        hand_offs: Carries moves out where engines schedule ahead; None: they begin at once.

    Attributes:
        computing: The beginnings that each engine computes.
    """

    def __init__(self, cluster: SimCluster, hand_offs: CutHandOffs | None) -> None:
        self._cluster = cluster
        self._hand_offs = hand_offs
        self.computing: dict[EngineId, list[SimRequest]] = {}

    def note_begun(self, engine: SimEngine) -> None:
        """Ask for room for the beginnings that have got their first chunk."""
        begun, engine.prefills.begun = engine.prefills.begun, []
        self.computing.setdefault(engine.engine_id, []).extend(begun)
        if self._hand_offs is not None:
            self._hand_offs.begin_parts(engine, begun)
            return
        for request in begun:
            self._ask_for_room(request, engine)

    def end_iteration(self, engine: SimEngine) -> None:
        """Send what an iteration has computed of the beginnings; those that have ended go to the other engine."""
        self.note_begun(engine)
        computing = self.computing.pop(engine.engine_id, [])
        parted, engine.parted = engine.parted, []
        still = [request for request in computing if request.is_cut and request.target == engine.engine_id]
        still = [request for request in still if request not in parted]
        if still:
            self.computing[engine.engine_id] = still
        if self._hand_offs is not None:
            self._hand_offs.end_parts(engine, still, parted)
            return
        cluster = self._cluster
        for request in still:
            computed = request.num_computed_tokens
            if cluster.cell.options.sends_parts and request.part_blocks and computed > request.sent_tokens:
                cluster.links.send(cluster.now, engine.setup, computed - request.sent_tokens, is_ahead=True)
                request.sent_tokens = computed
        for request in parted:
            if request.part_blocks or self._ask_for_room(request, engine):
                self._hand_off(request, engine)
            else:
                cluster.go_on_whole(request, engine)

    def arrive(self, request: SimRequest, source: SimEngine | None, second: SimEngine | None) -> None:
        """Let the second engine go on, or place the request again if one of the two has died."""
        if source is not None:
            source.release(request.num_blocks, request.part_tokens, request.source_table)
        if source is None or second is None:
            self._cluster.recover(request)
            return
        self._cluster.num_cut += 1
        second.take_part(request, request.part_tokens)
        self._cluster.start_engine(second)

    def fail(self, engine: SimEngine) -> None:
        """Forget what an engine computed that has died."""
        self.computing.pop(engine.engine_id, None)

    def _ask_for_room(self, request: SimRequest, source: SimEngine) -> bool:
        cluster = self._cluster
        num_blocks = blocks_for_tokens(request.prompt_tokens + 1, source.setup.block_size_tokens)
        target = cluster.find_target(request, MoveCause.SPLIT, source, num_blocks)
        if target is None or not has_room(target, num_blocks):
            cluster.num_blocked_moves += 1
            return False
        target.keep_room(request, num_blocks)
        cluster.note_grant(request, target, num_blocks)
        return True

    def _hand_off(self, request: SimRequest, source: SimEngine) -> None:
        cluster = self._cluster
        request.source = source.engine_id
        request.num_moves += 1
        cluster.num_moves[MoveCause.SPLIT] += 1
        left_tokens = max(0, request.part_tokens - request.sent_tokens)
        cluster.push(cluster.links.send(cluster.now, source.setup, left_tokens), TRANSFER_END, request)
