"""Request and result of a search for sliders; both cross a process boundary as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from sluice_operator.api.sliders import Sliders
from sluice_operator.autotune.engine_facts import EmulatedEngineFacts, EngineFacts, MeasuredEngineFacts
from sluice_operator.autotune.search_constraints import SearchConstraints, SearchObjectives
from sluice_operator.autotune.workload import SAMPLE_GROWTH, WorkloadSample, has_shifted


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
