"""How many engines a rate needs.

Goodput grows a little faster than the engines, because larger clusters even bursts out. Between two sizes whose goodput
a search has found, goodput per engine is taken to lie on a straight line; beyond them it stays what it is there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """Goodput by the number of engines.

    Args:
        points: Engines with their goodput in requests per second, ascending; at least one.

    Raises:
        ValueError: No points, or not ascending.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"goodputs of {sizes} engines; sizes are positive and ascend")

    def estimate_goodput_rps(self, num_engines: int) -> float:
        """Estimate the goodput of so many engines."""
        per_engine = [(size, goodput / size) for size, goodput in self.points]
        last = per_engine[0]
        for size, each in per_engine:
            if size >= num_engines:
                if size == last[0]:
                    return each * num_engines
                part = (num_engines - last[0]) / (size - last[0])
                return num_engines * (last[1] + (each - last[1]) * part)
            last = (size, each)
        return last[1] * num_engines

    def count_engines(self, rate_rps: float, least: int, most: int) -> int:
        """Count the fewest engines that serve a rate; ``most`` where none do.

        Args:
            rate_rps: The rate.
            least: Fewest.
            most: Most.
        """
        for number in range(max(least, 1), most):
            if self.estimate_goodput_rps(number) >= rate_rps:
                return least if rate_rps <= 0.0 else number
        return least if rate_rps <= 0.0 else most

    def add(self, num_engines: int, goodput_rps: float) -> CapacityCurve:
        """Add a size, or find its goodput anew."""
        others = [point for point in self.points if point[0] != num_engines]
        return CapacityCurve(tuple(sorted([*others, (num_engines, goodput_rps)])))
