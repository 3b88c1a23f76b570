"""The running decodes of one engine: which near their TPOT SLO, and which are longest, at no cost per iteration.

These are the orders of Algorithm 1 (TaiChi, section 3.3), which is in ``decode_flow``. All decodes of an engine gain
one token per iteration, so both orders are static:

- longest output first = ascending iteration number at which the length counter was zero;
- TPOT so far above ``alpha * tau``: ``now - t_first > alpha * tau * (output_tokens - 1)`` with
  ``output_tokens = k - k0`` (k counts iterations) is ``alpha * tau * (k0 + 1) - t_first > alpha * tau * k - now``,
  whose left side never changes; one order per TPOT SLO.

A decode is in exactly one state: *recently moved* (it came by a move fewer than ``min_tokens`` tokens ago), *ranked*
(in both orders), or *backing off* (proposed, or put back, until a time). Recently moved ones are few, because each is
so for ``min_tokens`` iterations only.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Final

from sluice_core.kv_blocks import KvBlocks, blocks_for_tokens
from sluice_core.records import RequestId, Role
from sluice_core.saved_tpot import NO_OBJECTIVE_S, SavedTpot

# The static key and the plain formula differ by rounding; candidates are checked by the latter.
_ROUNDING_S: Final = 1e-6
# Output tokens between the proposal of a planned move and its hand-off: an iteration each for the proposal, the grant
# and the hand-off, and one that is scheduled already.
SPLIT_LEAD_TOKENS: Final = 4
SPLIT_RETRY_TOKENS: Final = 16  # output tokens until a planned move that found no room is proposed again
_MOST_DOUBLINGS: Final = 5
LOST_BACK_OFF_S: Final = 1.0  # how long nobody waits for a decode that has lost its TPOT objective


class Decode:
    """One running decode; mutable, changed by ``DecodeSet`` only.

    A plain class: compiled, it is several times as fast to make as a record.

    Args:
        request_id: The request.
        number: Unique in the set, ascending by arrival: breaks ties.
        prompt_tokens: Prompt length.
        join_iteration: Iteration at which it joined.
        output_tokens: Output tokens that it had then.
        output_tokens_since_reset: Length that degradation sorts by, then.
        first_token_s: When the client got the first token, on the caller's clock.
        tpot_slo_s: TPOT objective, in seconds.
        is_moved_in: It came from another engine with its KV.
        split_tokens: Output tokens at which its part on this engine is planned to end; 0: it is not.

    Attributes:
        start_iteration: Iteration at which its output length was 0.
        reset_iteration: Iteration at which the length that degradation sorts by was 0.
        num_proposals: Proposals so far.
        proposed_blocks: Blocks that its standing proposal counts as released; None without one.
        is_ranked: It is in both orders.
        has_left: It is no longer a member.
    """

    __slots__ = (
        "first_token_s",
        "has_left",
        "is_moved_in",
        "is_ranked",
        "join_iteration",
        "num_proposals",
        "number",
        "prompt_tokens",
        "proposed_blocks",
        "request_id",
        "reset_iteration",
        "split_tokens",
        "start_iteration",
        "tpot_slo_s",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        number: int,
        prompt_tokens: int,
        join_iteration: int,
        output_tokens: int,
        output_tokens_since_reset: int,
        first_token_s: float,
        tpot_slo_s: float,
        is_moved_in: bool,
        split_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.start_iteration = join_iteration - output_tokens
        self.reset_iteration = join_iteration - output_tokens_since_reset
        self.first_token_s = first_token_s
        self.tpot_slo_s = tpot_slo_s
        self.is_moved_in = is_moved_in
        self.join_iteration = join_iteration
        self.split_tokens = split_tokens
        self.num_proposals = 0
        self.proposed_blocks: int | None = None
        self.is_ranked = False
        self.has_left = False


class DecodeSet:
    """The running decodes of one engine, of all routers; mutable, owned by the engine's scheduler.

    Call order of an iteration: ``advance`` (every member gained a token), ``join``/``leave`` for what started or
    ended in it, then ``FlowPolicy.propose``.

    Args:
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.

    Attributes:
        role: Role in force; set it on a configure.
        is_draining: Every decode is proposed; set it on a configure.
        kv_blocks_total: KV blocks of the engine; set with ``observe_kv`` before each ``propose``.
        kv_blocks_held: Of these, held by requests that have not been handed off.
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.
        split_lead_tokens: Tokens that a decode gains while a planned move is prepared.
        least_tpot_slo_s: The least TPOT objective that a decode has had here; ``math.inf`` before the first.
        num_proposed: Standing proposals.
        proposed_blocks: Blocks that they count as released.
    """

    def __init__(self, *, block_size_tokens: int, max_num_seqs: int) -> None:
        self.role = Role.DECODE_HEAVY
        self.is_draining = False
        self.kv_blocks_total = 0
        self.kv_blocks_held = 0
        self.block_size_tokens = block_size_tokens
        self.max_num_seqs = max_num_seqs
        self.least_tpot_slo_s = math.inf
        self.num_proposed = 0
        self.proposed_blocks = 0
        self.split_lead_tokens = SPLIT_LEAD_TOKENS
        self._iteration = 0
        self._num_joined = 0
        self._alpha = 1.0
        self._members: dict[RequestId, Decode] = {}
        self._prefilled_here: dict[RequestId, Decode] = {}  # prefilled here and ranked
        self._recently_moved: deque[Decode] = deque()
        self._longest: list[tuple[int, int, Decode]] = []
        self._by_tpot_key: dict[float, list[tuple[float, int, Decode]]] = {}  # by TPOT SLO; the most urgent is last
        self._backing_off: list[tuple[float, int, Decode]] = []  # a heap by the end of the back-off
        self._splits: list[tuple[int, int, Decode]] = []  # a heap by the iteration at which to propose the next part
        self._saved = SavedTpot()  # of those that have had an iteration of decodes here
        self._saved_of_new = SavedTpot()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._members

    def observe_kv(self, kv: KvBlocks) -> None:
        """Take the engine's KV blocks before a ``propose``; pinned ones are on their way out and do not count."""
        self.kv_blocks_total, self.kv_blocks_held = kv.total, kv.used - kv.pinned

    def join(
        self,
        request_id: RequestId,
        *,
        prompt_tokens: int,
        output_tokens: int,
        output_tokens_since_reset: int,
        first_token_s: float,
        tpot_slo_s: float,
        is_moved_in: bool,
        split_tokens: int = 0,
    ) -> None:
        """Add a decode that has at least one output token.

        Args:
            request_id: Unique on the engine.
            prompt_tokens: Prompt length.
            output_tokens: Tokens of the whole request so far, on all engines.
            output_tokens_since_reset: Length that Algorithm 1 sorts by: tokens since the last backflow.
            first_token_s: When the client got the first token, on the caller's clock.
            tpot_slo_s: TPOT objective, in seconds.
            is_moved_in: It came from another engine with its KV; False: it was prefilled here.
            split_tokens: Output tokens at which its part here is planned to end; 0: it is not.

        Raises:
            ValueError: Known already, or without an output token.
        """
        if request_id in self._members or output_tokens < 1:
            raise self._refuse(request_id, output_tokens)
        self._num_joined += 1
        decode = self._members[request_id] = Decode(
            request_id=request_id,
            number=self._num_joined,
            prompt_tokens=prompt_tokens,
            join_iteration=self._iteration,
            output_tokens=output_tokens,
            output_tokens_since_reset=output_tokens_since_reset,
            first_token_s=first_token_s,
            tpot_slo_s=min(tpot_slo_s, NO_OBJECTIVE_S),  # of infinity there is no key: times 0 it is no number
            is_moved_in=is_moved_in,
            split_tokens=split_tokens,
        )
        self._saved_of_new.add(tpot_slo_s, decode.start_iteration, first_token_s)
        self.least_tpot_slo_s = min(self.least_tpot_slo_s, tpot_slo_s)
        if split_tokens:
            self._note_split(decode)
        if is_moved_in:
            self._recently_moved.append(decode)
        else:
            self._rank(decode)

    def _refuse(self, request_id: RequestId, output_tokens: int) -> ValueError:
        """Say why a decode cannot join."""
        if request_id in self._members:
            return ValueError(f"request {request_id!r} is among the decodes already")
        return ValueError(f"request {request_id!r} has {output_tokens} output tokens, a decode has at least 1")

    def _note_split(self, decode: Decode) -> None:
        """Note when the planned end of a decode's part here is to be proposed."""
        due = decode.start_iteration + decode.split_tokens - self.split_lead_tokens
        heapq.heappush(self._splits, (due, decode.number, decode))

    def leave(self, request_id: RequestId) -> None:
        """Remove a decode that finished, was handed off, preempted or aborted. Unknown ones are ignored."""
        decode = self._members.pop(request_id, None)
        if decode is None:
            return
        decode.has_left = True
        self._get_saved(decode).remove(decode.tpot_slo_s, decode.start_iteration, decode.first_token_s)
        self._unrank(decode)
        self._withdraw_proposal(decode)
        while self._recently_moved and self._recently_moved[0].has_left:  # not every policy refreshes the ranking
            self._recently_moved.popleft()

    def advance(self, skipped: Iterable[RequestId] = ()) -> None:
        """Count an iteration in which every member gained one token.

        Args:
            skipped: Members that gained none (not scheduled); costs O(skipped).
        """
        self._iteration += 1
        self._saved.take(self._saved_of_new)
        if skipped:  # seldom, and an empty loop costs as much as the rest of this
            for request_id in skipped:
                self._shift(self._members[request_id], 1)

    def set_output_tokens(self, request_id: RequestId, output_tokens: int) -> None:
        """Correct a member's output length after the current iteration (several tokens in one step)."""
        self._shift(self._members[request_id], self.output_tokens(request_id) - output_tokens)

    def compute_mean_saved_tpot_s(self, now: float) -> float:
        """Compute the mean saved TPOT of those that were here before the last iteration of decodes began.

        Args:
            now: Seconds on the caller's clock.

        Returns:
            Seconds; ``math.inf`` without a decode that has an objective.
        """
        return self._saved.compute_mean_s(now, self._iteration)

    def output_tokens(self, request_id: RequestId) -> int:
        """Count the tokens of the whole request so far."""
        return self._iteration - self._members[request_id].start_iteration

    def output_tokens_since_reset(self, request_id: RequestId) -> int:
        """Count the length that Algorithm 1 sorts by."""
        return self._iteration - self._members[request_id].reset_iteration

    def count_blocks(self, decode: Decode) -> int:
        """Count the KV blocks that a decode holds: its last token has no KV yet."""
        num_tokens = decode.prompt_tokens + self._iteration - decode.start_iteration - 1
        return blocks_for_tokens(num_tokens, self.block_size_tokens)

    def has_tpot_above(self, decode: Decode, now: float, share: float) -> bool:
        """Say whether its TPOT so far is above a share of its SLO; never before the second token."""
        num_gaps = self._iteration - decode.start_iteration - 1
        return num_gaps > 0 and now - decode.first_token_s > share * decode.tpot_slo_s * num_gaps

    def compute_tpot_share(self, decode: Decode, now: float) -> float:
        """Compute its TPOT so far as a share of its SLO; 0 before the second token."""
        num_gaps = self._iteration - decode.start_iteration - 1
        return (now - decode.first_token_s) / (num_gaps * decode.tpot_slo_s) if num_gaps > 0 else 0.0

    def refresh_ranking(self, now: float, *, min_tokens: int, alpha: float) -> None:
        """Rank what may be proposed (again): O(ranked anew), and O(members) when alpha changes.

        Args:
            now: Seconds on the caller's clock.
            min_tokens: Output tokens between two moves of a request.
            alpha: Approaching factor.
        """
        self.withdraw_lapsed(now)
        while self._recently_moved and self._iteration - self._recently_moved[0].join_iteration >= min_tokens:
            decode = self._recently_moved.popleft()
            if not decode.has_left and decode.proposed_blocks is None:
                self._rank(decode)
        if alpha != self._alpha:
            self._alpha = alpha
            self._rebuild_tpot_order()

    def withdraw_lapsed(self, now: float) -> None:
        """Let what was proposed and not granted be proposed again, once its time is over."""
        while self._backing_off and (self._backing_off[0][0] <= now or self._backing_off[0][2].has_left):
            decode = heapq.heappop(self._backing_off)[2]
            if not decode.has_left:
                self._withdraw_proposal(decode)
                self._rank(decode)

    def list_recently_moved(self) -> list[Decode]:
        """List decodes that came by a move fewer than ``min_tokens`` tokens ago."""
        if not self._recently_moved:
            return []
        return [
            decode
            for decode in self._recently_moved
            if not decode.has_left and not decode.is_ranked and decode.proposed_blocks is None
        ]

    def list_prefilled_here(self, limit: int) -> list[Decode]:
        """List at most ``limit`` ranked decodes that were prefilled here, oldest first."""
        found: list[Decode] = []
        if self._prefilled_here:
            for decode in self._prefilled_here.values():
                if len(found) >= limit:
                    break
                found.append(decode)
        return found

    def take_new_here(self, limit: int) -> list[Decode]:
        """List at most ``limit`` decodes that were prefilled here, newest first, each once."""
        found: list[Decode] = []
        for decode in reversed(self._prefilled_here.values()):
            if decode.num_proposals or len(found) == limit:
                break
            decode.num_proposals = 1
            found.append(decode)
        return found

    def take_due_splits(self) -> list[Decode]:
        """List the decodes whose part here is about to end as planned; each comes again until it has left: O(listed).

        A decode that stays is listed again when it has ``SPLIT_RETRY_TOKENS`` more, then twice as many, and so on.
        """
        found: list[Decode] = []
        while self._splits and self._splits[0][0] <= self._iteration:
            decode = heapq.heappop(self._splits)[2]
            if decode.has_left:
                continue
            # It may have been left out of iterations, and have fewer tokens than was to be expected.
            due = decode.start_iteration + decode.split_tokens - self.split_lead_tokens
            if due <= self._iteration:
                found.append(decode)
                due = self._iteration + SPLIT_RETRY_TOKENS * 2 ** min(decode.num_proposals, _MOST_DOUBLINGS)
                decode.num_proposals += 1
            heapq.heappush(self._splits, (due, decode.number, decode))
        return found

    def list_without_proposal(self, limit: int) -> list[Decode]:
        """List at most ``limit`` members without a standing proposal, oldest first."""
        idle = (decode for decode in self._members.values() if decode.proposed_blocks is None)
        return [decode for decode, _ in zip(idle, range(limit), strict=False)]

    def get_longest(self) -> Decode | None:
        """Return the ranked decode with the longest output since its reset; of equals the first to join."""
        return self._longest[0][2] if self._longest else None

    def list_near_tpot_slo(self, now: float, limit: int) -> list[Decode]:
        """List ranked decodes whose TPOT so far is above alpha times their SLO: at most ``limit`` per distinct SLO."""
        slow: list[Decode] = []
        for tpot_slo_s, order in self._by_tpot_key.items():
            bound = self._alpha * tpot_slo_s * self._iteration - now - _ROUNDING_S
            found = 0
            for key, _, decode in reversed(order):
                if key <= bound or found == limit:
                    break
                if self.has_tpot_above(decode, now, self._alpha):
                    slow.append(decode)
                    found += 1
        return slow

    def find_least_slack_s(
        self,
        now: float,
        num_gaps: int = 1,
        lost_s: float = math.inf,
    ) -> float:
        """Compute the longest time that further gaps may take together so that no ranked decode's TPOT exceeds alpha.

        Decodes that are behind by more than ``lost_s`` stay out for ``LOST_BACK_OFF_S``: O(those), and O(SLOs).

        Args:
            now: When the first gap begins, in seconds on the caller's clock.
            num_gaps: Gaps.
            lost_s: See above.

        Returns:
            Seconds, negative when a decode is behind; ``math.inf`` without a ranked decode.
        """
        least_s = math.inf
        for tpot_slo_s, order in list(self._by_tpot_key.items()):
            due_s = self._alpha * tpot_slo_s * (self._iteration + num_gaps) - now
            while order and due_s - order[-1][0] < -lost_s:
                self.back_off(order[-1][2], now + LOST_BACK_OFF_S)
            if order:
                least_s = min(least_s, due_s - order[-1][0])
        return least_s

    def propose(self, decode: Decode, until_s: float) -> None:
        """Let a proposal stand: its blocks count as released until it leaves or ``until_s``."""
        self._unrank(decode)
        self._withdraw_proposal(decode)
        decode.num_proposals += 1
        decode.proposed_blocks = self.count_blocks(decode)
        self.num_proposed += 1
        self.proposed_blocks += decode.proposed_blocks
        heapq.heappush(self._backing_off, (until_s, decode.number, decode))

    def back_off(self, decode: Decode, until_s: float) -> None:
        """Leave a ranked decode out of both orders until ``until_s``."""
        self._unrank(decode)
        heapq.heappush(self._backing_off, (until_s, decode.number, decode))

    def _withdraw_proposal(self, decode: Decode) -> None:
        """End a standing proposal."""
        if decode.proposed_blocks is not None:
            self.num_proposed -= 1
            self.proposed_blocks -= decode.proposed_blocks
            decode.proposed_blocks = None

    def _shift(self, decode: Decode, num_iterations: int) -> None:
        """Move a decode's counters by some iterations, and its place in the orders with them."""
        was_ranked = decode.is_ranked
        self._unrank(decode)
        saved = self._get_saved(decode)
        saved.remove(decode.tpot_slo_s, decode.start_iteration, decode.first_token_s)
        decode.start_iteration += num_iterations
        decode.reset_iteration += num_iterations
        saved.add(decode.tpot_slo_s, decode.start_iteration, decode.first_token_s)
        if was_ranked:
            self._rank(decode)

    def _get_saved(self, decode: Decode) -> SavedTpot:
        """Return the sums that a decode counts in."""
        return self._saved_of_new if decode.join_iteration == self._iteration else self._saved

    def _compute_tpot_key(self, decode: Decode) -> float:
        """Compute the static key of the TPOT order."""
        return self._alpha * decode.tpot_slo_s * (decode.start_iteration + 1) - decode.first_token_s

    def _rank(self, decode: Decode) -> None:
        """Put a decode in both orders."""
        if decode.is_ranked:
            return
        decode.is_ranked = True
        insort(self._longest, (decode.reset_iteration, decode.number, decode))
        order = self._by_tpot_key.setdefault(decode.tpot_slo_s, [])
        insort(order, (self._compute_tpot_key(decode), decode.number, decode))
        if not decode.is_moved_in:
            self._prefilled_here[decode.request_id] = decode

    def _unrank(self, decode: Decode) -> None:
        """Take a decode out of both orders."""
        if not decode.is_ranked:
            return
        decode.is_ranked = False
        del self._longest[bisect_left(self._longest, (decode.reset_iteration, decode.number))]
        order = self._by_tpot_key[decode.tpot_slo_s]
        del order[bisect_left(order, (self._compute_tpot_key(decode), decode.number))]
        if not order:
            del self._by_tpot_key[decode.tpot_slo_s]
        self._prefilled_here.pop(decode.request_id, None)

    def _rebuild_tpot_order(self) -> None:
        """Build the TPOT orders again."""
        self._by_tpot_key = {}
        for _, number, decode in self._longest:
            self._by_tpot_key.setdefault(decode.tpot_slo_s, []).append((self._compute_tpot_key(decode), number, decode))
        for order in self._by_tpot_key.values():
            order.sort()
