"""Request and result of a search for sliders; both cross a process boundary as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice_core.strategies import get_strategy
from sluice_core.strategy_parameters import PARAMETERS, read_parameters
from sluice_operator.api.field_types import percent
from sluice_operator.api.sliders import AUTO, Sliders, resolve_sliders, write_parameters
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts, EngineFacts, MeasuredEngineFacts
from sluice_operator.autotune.workload import SAMPLE_GROWTH, WorkloadSample, has_shifted

if TYPE_CHECKING:
    from sluice_core.strategy_parameters import StrategyParameters
    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.api.spec.autotune_spec import CountBounds, TokenBounds

# Least chunk size of P-heavy engines where no bounds are given.
MIN_PREFILL_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchObjectives:
    """An SLO class and its objectives.

    Args:
        name: Empty for the default one.
        ttft_milliseconds: TTFT.
        tpot_milliseconds: TPOT.
        priority: Higher goes first.
    """

    name: str
    ttft_milliseconds: int
    tpot_milliseconds: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConstraints:
    """The part of a request that the spec fixes; a change of it makes a running search pointless.

    Args:
        replicas: Engines.
        strategy: As ``sluice_core`` calls it; ``auto``: any.
        classes: Objectives, the default class first.
        target: Attainment, 0.9 is 90 %.
        parameters: Those of all strategies, as on the wire.
        max_batch_tokens: Largest chunk size.
        link: What KV moves over, as ``sluice_core`` calls it.
        prefill_heavy: Least and most P-heavy engines, as counts or percentages.
        prefill_tokens: Least and most chunk size of P-heavy engines.
        decode_tokens: Least and most chunk size of the others.
    """

    replicas: int
    strategy: str
    classes: tuple[SearchObjectives, ...]
    target: float
    parameters: dict[str, str]
    max_batch_tokens: int
    link: str
    prefill_heavy: tuple[str, str]
    prefill_tokens: tuple[int, int]
    decode_tokens: tuple[int, int]

    @property
    def strategy_parameters(self) -> StrategyParameters:
        """The parameters, read."""
        return read_parameters(PARAMETERS, self.parameters, self.strategy)

    @property
    def chooses_strategy(self) -> bool:
        """Whether the strategy is to be chosen too."""
        return self.strategy == AUTO.lower()

    @property
    def is_fixed(self) -> bool:
        """Whether the bounds leave no choice."""
        if self.chooses_strategy:
            return False
        pairs = (self.prefill_heavy, self.prefill_tokens, self.decode_tokens)
        return all(low == high for low, high in pairs)

    def equals_but_for_size(self, other: SearchConstraints) -> bool:
        """Whether these are for the same objectives and bounds, whatever the number of engines."""
        return replace(self, replicas=other.replicas, prefill_heavy=other.prefill_heavy) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What a search is for.

    Args:
        constraints: What the spec fixes.
        spec_sliders: Sliders that the spec asks for.
        in_force: Sliders in force.
        workload: Requests to serve.
        engine: How fast an engine is.
    """

    constraints: SearchConstraints
    spec_sliders: Sliders
    in_force: Sliders
    workload: WorkloadSample
    engine: EngineFacts

    def has_shifted(self, other: SearchRequest) -> bool:
        """Whether workload or engines have changed since this request."""
        return has_shifted(self.workload, other.workload) or self.engine.differs(other.engine)

    def is_small_beside(self, other: SearchRequest) -> bool:
        """Whether the other request's sample is much larger."""
        return len(other.workload.rows) >= SAMPLE_GROWTH * len(self.workload.rows)

    def to_data(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        kind = "emulated" if isinstance(self.engine, EmulatedEngineFacts) else "measured"
        return {**asdict(self), "kind": kind}

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str) -> SearchRequest:
        """Reads what ``to_json`` wrote."""
        return cls.from_data(json.loads(text))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> SearchRequest:
        """Reads what ``to_data`` made, after its way through JSON."""
        engine_type = EmulatedEngineFacts if data["kind"] == "emulated" else MeasuredEngineFacts
        constraints = _freeze(data["constraints"])
        constraints["classes"] = tuple(SearchObjectives(**item) for item in constraints["classes"])
        rows = tuple((prompt, output, name) for prompt, output, name in data["workload"]["rows"])
        return cls(
            constraints=SearchConstraints(**constraints),
            spec_sliders=Sliders(**data["spec_sliders"]),
            in_force=Sliders(**data["in_force"]),
            workload=WorkloadSample(rows=rows, rate_rps=data["workload"]["rate_rps"]),
            engine=engine_type(**_freeze(data["engine"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Args:
        sliders: The best.
        goodput_rps: Their goodput.
        attainment: Their predicted attainment at the request's rate, 0 to 1.
        in_force_goodput_rps: Goodput of the sliders in force, on the same requests.
        in_force_attainment: Predicted attainment of these.
        least_gain: Goodput over that of the sliders in force, minus 1, of the seed where it is least.
    """

    sliders: Sliders
    goodput_rps: float
    attainment: float
    in_force_goodput_rps: float
    in_force_attainment: float
    least_gain: float

    @property
    def gain(self) -> float:
        """Goodput over that of the sliders in force, minus 1; infinite where these serve nothing."""
        if self.in_force_goodput_rps <= 0.0:
            return float("inf") if self.goodput_rps > 0.0 else 0.0
        return self.goodput_rps / self.in_force_goodput_rps - 1.0

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SearchResult:
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError: Something else.
        """
        try:
            data = json.loads(text)
            return cls(**{**data, "sliders": Sliders(**data["sliders"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a search result: {error}") from error


def _freeze(data: dict[str, Any]) -> dict[str, Any]:
    """Turns lists, which are all that JSON has, into tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _read_objectives(spec: ServingClusterSpec) -> tuple[SearchObjectives, ...]:
    default = SearchObjectives(
        name="",
        ttft_milliseconds=spec.slo.ttft_milliseconds,
        tpot_milliseconds=spec.slo.tpot_milliseconds,
        priority=0,
    )
    return default, *(SearchObjectives(**slo_class.model_dump(by_alias=False)) for slo_class in spec.slo.classes)


def make_constraints(spec: ServingClusterSpec) -> SearchConstraints:
    """Reads the constraints of a search from a spec.

    In mode Apply a slider without bounds stays as the spec says; a recommendation may name any value for it. So may a
    choice of strategy, as each needs its own.
    """
    sliders, bounds = resolve_sliders(spec), spec.autotune.bounds
    most = spec.engine.max_batch_tokens
    counts, prefill_tokens, decode_tokens = ("0%", "100%"), (MIN_PREFILL_TOKENS, most), (0, most)
    if spec.autotune.mode == "Apply" and spec.strategy != AUTO:
        counts = (str(sliders.num_prefill_heavy), str(sliders.num_prefill_heavy))
        prefill_tokens = (sliders.prefill_heavy_tokens, sliders.prefill_heavy_tokens)
        decode_tokens = (sliders.decode_heavy_tokens, sliders.decode_heavy_tokens)
    constraints = SearchConstraints(
        replicas=spec.replicas,
        strategy=spec.strategy.lower(),
        classes=_read_objectives(spec),
        target=percent(spec.slo.attainment) / 100,
        parameters=write_parameters(spec, PARAMETERS),
        max_batch_tokens=most,
        link="infiniband" if spec.network.mode == "RDMA" else "tcp",
        prefill_heavy=_read_counts(bounds.prefill_heavy, counts),
        prefill_tokens=_read_tokens(bounds.chunk_sizes.prefill_heavy, prefill_tokens),
        decode_tokens=_read_tokens(bounds.chunk_sizes.decode_heavy, decode_tokens),
    )
    if constraints.chooses_strategy:
        return constraints
    # A slider that the strategy ignores is not searched.
    if constraints.strategy == "aggregated":
        count = str(sliders.num_prefill_heavy)
        return replace(constraints, prefill_heavy=(count, count), decode_tokens=constraints.prefill_tokens)
    sliders_used = get_strategy(constraints.strategy).sliders
    if not (sliders_used.varies_ratio or sliders_used.varies_prefill_tokens or sliders_used.varies_decode_tokens):
        count = str(sliders.num_prefill_heavy)
        return replace(
            constraints, prefill_heavy=(count, count), prefill_tokens=(most, most), decode_tokens=(most, most)
        )
    if constraints.strategy == "disaggregated":
        return replace(constraints, prefill_tokens=(most, most), decode_tokens=(0, 0))
    return constraints


def _read_counts(bounds: CountBounds | None, free: tuple[str, str]) -> tuple[str, str]:
    return free if bounds is None else (str(bounds.min), str(bounds.max))


def _read_tokens(bounds: TokenBounds | None, free: tuple[int, int]) -> tuple[int, int]:
    return free if bounds is None else (bounds.min, bounds.max)
