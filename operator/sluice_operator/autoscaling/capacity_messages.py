"""Request and result of a search for what fleets of several sizes serve; both cross a process boundary as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice_core.autoscaling.capacity_curve import CapacityCurve
from sluice_operator.api.sliders import Sliders, resolve_sliders, scale_sliders
from sluice_operator.autotune.search_constraints import make_constraints
from sluice_operator.autotune.search_messages import SearchRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.api.serving_cluster import ServingClusterSpec
    from sluice_operator.autotune.engine_facts import EngineFacts
    from sluice_operator.autotune.workload import WorkloadSample

# Larger fleets are taken to serve as much per engine: a few percent less than they do.
MOST_SEARCHED_ENGINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRequest:
    """What a search is for.

    Args:
        requests: One for each size, ascending; alike but for the number of engines and what follows from it.
        may_tune: Whether better sliders may be put in force; otherwise those in force are measured.
    """

    requests: tuple[SearchRequest, ...]
    may_tune: bool

    @property
    def largest(self) -> SearchRequest:
        """The request of the largest size."""
        return self.requests[-1]

    def differs(self, other: CapacityRequest) -> bool:
        """Whether the other request has other objectives, bounds or sliders, workload aside."""
        mine, theirs = ([_fix(request) for request in item.requests] for item in (self, other))
        return mine != theirs or self.may_tune != other.may_tune

    def has_shifted(self, other: CapacityRequest) -> bool:
        """Whether lengths of requests or engines have changed since this request; the rate does not matter."""
        mine, theirs = self.largest, other.largest
        lengths = zip(mine.workload.means[1:], theirs.workload.means[1:], strict=True)
        has_grown = mine.is_small_beside(theirs)
        return has_grown or mine.engine.differs(theirs.engine) or any(old.differs(new) for old, new in lengths)

    def to_json(self) -> str:
        """Serializes to JSON; the workload once."""
        bare = [replace(request, workload=replace(request.workload, rows=())) for request in self.requests]
        rows = [list(row) for row in self.largest.workload.rows]
        requests = [request.to_data() for request in bare]
        return json.dumps({"requests": requests, "rows": rows, "may_tune": self.may_tune})

    @classmethod
    def from_json(cls, text: str) -> CapacityRequest:
        """Reads what ``to_json`` wrote."""
        data: dict[str, Any] = json.loads(text)
        rows = tuple((prompt, output, name) for prompt, output, name in data["rows"])
        requests = [SearchRequest.from_data(item) for item in data["requests"]]
        whole = [replace(item, workload=replace(item.workload, rows=rows)) for item in requests]
        return cls(requests=tuple(whole), may_tune=bool(data["may_tune"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPoint:
    """What a fleet of one size serves.

    Args:
        replicas: Engines.
        goodput_rps: With these sliders.
        sliders: The best that were found for the size.
    """

    replicas: int
    goodput_rps: float
    sliders: Sliders


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """What a search found.

    Args:
        points: Of each size, ascending.
    """

    points: tuple[CapacityPoint, ...]

    @property
    def curve(self) -> CapacityCurve:
        """Goodput by the number of engines."""
        return CapacityCurve(tuple([(point.replicas, point.goodput_rps) for point in self.points]))

    def find_sliders(self, replicas: int) -> Sliders:
        """Finds the sliders for so many engines: those of the nearest size, scaled."""
        nearest = min(self.points, key=lambda point: (abs(point.replicas - replicas), point.replicas))
        return scale_sliders(nearest.sliders, nearest.replicas, replicas)

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CapacityResult:
        """Reads what ``to_json`` wrote.

        Raises:
            ValueError: Something else.
        """
        return cls.from_data(json.loads(text))

    @classmethod
    def from_data(cls, data: Any) -> CapacityResult:
        """Reads what JSON has of it.

        Raises:
            ValueError: Something else.
        """
        try:
            points = [CapacityPoint(**{**item, "sliders": Sliders(**item["sliders"])}) for item in data["points"]]
            result = cls(points=tuple(points))
            result.curve  # noqa: B018 - raises for sizes that are none
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a result of a search for capacity: {error}") from error
        else:
            return result


def list_sizes(least: int, most: int) -> tuple[int, ...]:
    """Lists the sizes that are searched: powers of two, and the largest."""
    most = max(min(most, MOST_SEARCHED_ENGINES), least)
    powers = [2**exponent for exponent in range(most.bit_length()) if least <= 2**exponent <= most]
    return tuple(sorted({least, *powers, most}))


def make_capacity_request(
    spec: ServingClusterSpec,
    sizes: tuple[int, ...],
    find_sliders: Callable[[ServingClusterSpec], Sliders],
    workload: WorkloadSample,
    engine: EngineFacts,
) -> CapacityRequest:
    """Makes the request of a cluster.

    Args:
        spec: The spec.
        sizes: See ``list_sizes``.
        find_sliders: Finds the sliders in force for a spec of some size.
        workload: Requests to serve.
        engine: How fast an engine is.
    """
    requests = []
    for size in sizes:
        sized = spec.model_copy(update={"replicas": size})
        requests.append(
            SearchRequest(
                constraints=make_constraints(sized),
                spec_sliders=resolve_sliders(sized),
                in_force=find_sliders(sized),
                workload=workload,
                engine=engine,
            )
        )
    return CapacityRequest(requests=tuple(requests), may_tune=spec.autotune.mode == "Apply")


def _fix(request: SearchRequest) -> object:
    return request.constraints, request.in_force
