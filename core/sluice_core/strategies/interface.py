"""What a strategy is: parameters, sliders, needs, and the policies of router and engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from sluice_core.records import Decision, EngineId, MoveCause, PrefillRequest, RequestId, Role
from sluice_core.scheduling.decode_flow import FlowRequest
from sluice_core.scheduling.engine_policy import EnginePolicy
from sluice_core.scheduling.engine_table import EngineTable
from sluice_core.scheduling.placement_records import NUM_RECORDS, PlacementRecord
from sluice_core.scheduling.splitting.predicted_output_lengths import OutputLengths
from sluice_core.scheduling.waiting_order import Urgency, compute_urgency
from sluice_core.strategies.placements import PLACEMENTS
from sluice_core.strategy_parameters import Parameter, StrategyParameters, format_parameters, read_parameters


class Need(StrEnum):
    """What a strategy may need of an engine beyond chunked prefill and hand-offs of whole requests.

    ``SPLIT``: a decode is handed off at the token that was planned. ``PARTS``: a prompt is cut, its KV moves in parts.
    """

    SPLIT = "split"
    PARTS = "parts"
    PHASES = "phases"
    INTERRUPT = "interrupt"
    GROUPS = "groups"


class RouterPolicy:
    """Decides where prefills run, and where requests that move go. Synchronous; ``now`` is an argument."""

    def assign(
        self,
        now: float,
        waiting: Iterable[PrefillRequest],
        engines: EngineTable,
    ) -> list[Decision]:
        """See ``PlacementPolicy.assign``."""
        raise NotImplementedError

    def compute_urgency(
        self,
        now: float,  # noqa: ARG002 - for overrides
        *,
        is_recovery: bool,
        next_token_due_s: float,
        priority: int,
        arrival_s: float,
        ttft_slo_s: float,  # noqa: ARG002 - for overrides
        prompt_tokens: int,  # noqa: ARG002 - for overrides
    ) -> Urgency:
        """Order what waits at the router, lowest first; only the first ``MAX_ASSIGNED_AT_ONCE`` get to ``assign``.

        Args:
            now: Seconds on the caller's clock.
            is_recovery: See ``PrefillRequest``, also for the others.
            next_token_due_s: See there.
            priority: See there.
            arrival_s: See there.
            ttft_slo_s: See ``Slo``.
            prompt_tokens: See ``PrefillRequest``.
        """
        return compute_urgency(
            is_recovery=is_recovery, next_token_due_s=next_token_due_s, priority=priority, arrival_s=arrival_s
        )

    def take_records(self, number: int) -> list[PlacementRecord | None]:
        """Return what is kept of the last decisions, in their order; None for one that was not kept."""
        return [None] * number

    def take_events(self) -> Sequence[str]:
        """Return what the strategy has done since it was last asked that no request shows; metrics count it by name."""
        return ()

    def target(self, now: float, request: FlowRequest, engines: EngineTable) -> EngineId | None:
        """Pick the engine to ask for a grant.

        Args:
            now: Seconds on the caller's clock.
            request: What moves and why.
            engines: The engines.

        Returns:
            The target; None: it stays where it is.
        """
        raise NotImplementedError

    def moves_first_decode(self, source: Role | None, engines: EngineTable) -> bool:  # noqa: ARG002 - for overrides
        """Say whether a request whose prefill has just ended should leave its engine.

        Args:
            source: The engine's role.
            engines: The engines.
        """
        return False

    def has_decode_engines(self, engines: EngineTable) -> bool:  # noqa: ARG002 - for overrides
        """Say whether a finished prefill whose engine has handed it off may find an engine that decodes it."""
        return False

    def get_grant_wait_s(self) -> float:
        """Return how long a finished prefill that its engine has handed off waits for a decode engine, in seconds."""
        return StrategyParameters().grant_wait_s

    def is_too_soon(self, cause: MoveCause, tokens_since_move: int | None) -> bool:  # noqa: ARG002 - for overrides
        """Say whether a move follows the last one too closely.

        Args:
            cause: Why the request should move.
            tokens_since_move: Output tokens since its last move; None: it has not moved yet.
        """
        return False

    def note_finished(self, request_id: RequestId, output_tokens: int) -> None:
        """Take note of a request that has ended; no policy needs to.

        Args:
            request_id: The request.
            output_tokens: Tokens of its answer; 0: it was given up.
        """

    def use_lengths(self, lengths: OutputLengths) -> None:
        """Predict output lengths by something else, in a simulation; for a policy that predicts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliderUse:
    """How a strategy uses the sliders of a spec, and so which of them a planner may vary.

    Args:
        varies_ratio: The number of P-heavy engines matters.
        varies_prefill_tokens: P-heavy engines have the chunk size of the spec; False: the largest that they can run.
        varies_decode_tokens: D-heavy engines have the chunk size of the spec.
        decode_tokens: Chunk size of the D-heavy engines otherwise; None: that of the P-heavy ones.
    """

    varies_ratio: bool
    varies_prefill_tokens: bool
    varies_decode_tokens: bool
    decode_tokens: int | None = None

    @property
    def varies_any(self) -> bool:
        """There is something to tune."""
        return self.varies_ratio or self.varies_prefill_tokens or self.varies_decode_tokens

    @property
    def has_roles(self) -> bool:
        """Engines differ; without roles all have the chunk size of P-heavy ones."""
        return self.varies_ratio

    def resolve(self, prefill_tokens: int, decode_tokens: int, max_batch_tokens: int) -> tuple[int, int]:
        """Turn the chunk sizes of a spec into those of the P-heavy and the D-heavy engines, in tokens.

        Args:
            prefill_tokens: S_P of the spec.
            decode_tokens: S_D of the spec.
            max_batch_tokens: Largest chunk size of the engines.
        """
        prefill = prefill_tokens if self.varies_prefill_tokens else max_batch_tokens
        if self.varies_decode_tokens:
            return prefill, decode_tokens
        return prefill, prefill if self.decode_tokens is None else self.decode_tokens


class PolicyMaker(Protocol):
    """Makes the policies of a row."""

    def make_router(
        self, strategy: Strategy, parameters: StrategyParameters, rng: random.Random, num_records: int
    ) -> RouterPolicy:
        """See ``Strategy.make_router``."""
        ...

    def make_engine(self, strategy: Strategy, parameters: StrategyParameters, *, counts_decodes: bool) -> EnginePolicy:
        """See ``Strategy.make_engine``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A row of ``STRATEGIES``.

    Args:
        name: Lower-case name, as on the command line and in a plan.
        title: Name in a manifest: ``name`` but for case.
        parameters: What a manifest may set, and with which bounds.
        sliders: What a spec means for the engines.
        policies: Makes the policies of router and engine.
        needs: What an engine must be able to do; one that is not refuses the plan.
        placement: Where prefills run: a key of ``placements.PLACEMENTS``.
        has_flow: False where requests decode where their prefill ran.
    """

    name: str
    title: str
    parameters: tuple[Parameter, ...]
    sliders: SliderUse
    policies: PolicyMaker
    needs: frozenset[Need] = frozenset()
    placement: str = "length_aware"
    has_flow: bool = True

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement {self.placement!r} is unknown; known are {', '.join(PLACEMENTS)}")

    def read_parameters(self, values: Mapping[str, str]) -> StrategyParameters:
        """Read the parameters of a plan; what it does not name has its default.

        Args:
            values: As on the wire, by name.

        Raises:
            ValueError: A parameter of another strategy, or a value out of bounds.
        """
        return read_parameters(self.parameters, values, self.name)

    def format_parameters(self, parameters: StrategyParameters) -> dict[str, str]:
        """Write parameters as on the wire, by name."""
        return format_parameters(self.parameters, parameters)

    def check_capabilities(self, capabilities: frozenset[Need]) -> None:
        """Check that an engine can run this strategy.

        Args:
            capabilities: What the engine can do.

        Raises:
            ValueError: It lacks something; names it.
        """
        missing = sorted(self.needs - capabilities)
        if missing:
            known = ", ".join(sorted(capabilities)) or "none of these"
            raise ValueError(f"strategy {self.name!r} needs {', '.join(missing)}; this engine offers {known}")

    def vary(self, *, placement: str | None = None, flows: bool | None = None) -> Strategy:
        """Make a variant, for comparisons (TaiChi, section 4.4: the breakdown of its Figure 18).

        Args:
            placement: Key of ``placements.PLACEMENTS``; None: as it is.
            flows: False: requests decode where their prefill ran; None: as it is.

        Raises:
            ValueError: An unknown placement, or flow switched on that the strategy does not have.
        """
        if flows and not self.has_flow:
            raise ValueError(f"strategy {self.name!r} has no flow to switch on")
        return replace(
            self,
            placement=self.placement if placement is None else placement,
            has_flow=self.has_flow if flows is None else flows,
        )

    def make_router(
        self, parameters: StrategyParameters, rng: random.Random, *, num_records: int = NUM_RECORDS
    ) -> RouterPolicy:
        """Make the router's policy.

        Args:
            parameters: Live parameters.
            rng: Breaks ties; seeded by the caller.
            num_records: Decisions kept for explanations.
        """
        return self.policies.make_router(self, parameters, rng, num_records)

    def make_engine(self, parameters: StrategyParameters, *, counts_decodes: bool = True) -> EnginePolicy:
        """Make the policy of one engine.

        Args:
            parameters: Live parameters.
            counts_decodes: See ``ChunkedPrefillPolicy``.
        """
        return self.policies.make_engine(self, parameters, counts_decodes=counts_decodes)
