"""The message under way: what one iteration has for one router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True)
class PendingResponse:
    """Fields of the next ``AttachResponse``; ``slots``, ``token_ids`` and ``output_indexes`` are parallel columns."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    output_indexes: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    finished: list[wire.Finished] = field(default_factory=list)
    proposals: list[wire.Proposal] = field(default_factory=list)
    refused: list[wire.HandOffRefused] = field(default_factory=list)
    parts_pulled: list[wire.PartPulled] = field(default_factory=list)
    claim_answers: list[wire.ClaimAnswer] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Nothing happened for this router."""
        answers = self.refused or self.parts_pulled or self.claim_answers
        return not (self.slots or self.finished or self.proposals or answers)

    def add_tokens(self, slot: int, token_ids: Iterable[int], index: int) -> None:
        """Adds tokens of a slot, the first of which has this index in the whole output."""
        for token_id in token_ids:
            self.slots.append(slot)
            self.token_ids.append(token_id)
            self.output_indexes.append(index)
            index += 1

    def make_message(
        self, load: wire.LoadReport | None, prefixes: wire.PrefixChanges | None = None
    ) -> wire.AttachResponse:
        """Makes the message, with a load report and changes of the prefix cache."""
        return wire.AttachResponse(
            slots=self.slots,
            token_ids=self.token_ids,
            output_indexes=self.output_indexes,
            logprobs=self.logprobs,
            finished=self.finished,
            proposals=self.proposals,
            hand_offs_refused=self.refused,
            parts_pulled=self.parts_pulled,
            claim_answers=self.claim_answers,
            load=load,
            prefixes=prefixes,
        )
