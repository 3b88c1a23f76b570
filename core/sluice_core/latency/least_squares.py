"""Non-negative least squares on relative residuals, in closed form: the attention fits have three coefficients."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

_NUM_FEATURES = 3


class Fit(NamedTuple):
    """Coefficients of ``time = a * x0 + b * x1 + c * x2``.

    Args:
        coefficients: a, b and c, none negative.
        num_points: Measurements.
        relative_error: Mean of abs(fit - measured) / measured.
    """

    coefficients: tuple[float, float, float]
    num_points: int
    relative_error: float


def fit_times(features: list[tuple[float, float, float]], times: list[float]) -> Fit:
    """Fits times with weights 1 / time.

    Args:
        features: x0, x1, x2 of each measurement.
        times: Its time; positive.

    Raises:
        ValueError: There is nothing to fit.
    """
    if not times:
        raise ValueError("no measurement to fit")
    gram = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
    moments = [0.0] * _NUM_FEATURES
    for row, time in zip(features, times, strict=True):
        scaled = [x / time for x in row]
        for i in range(_NUM_FEATURES):
            moments[i] += scaled[i]
            for j in range(_NUM_FEATURES):
                gram[i][j] += scaled[i] * scaled[j]
    a, b, c = _solve_non_negative(gram, moments)
    errors = [abs((a * x + b * y + c * z) / time - 1.0) for (x, y, z), time in zip(features, times, strict=True)]
    return Fit((a, b, c), len(times), sum(errors) / len(errors))


def _solve_non_negative(gram: list[list[float]], moments: list[float]) -> tuple[float, float, float]:
    """Tries every set of positive coefficients: the best feasible one is the answer of the convex problem."""
    best = [0.0] * _NUM_FEATURES
    best_gain = 0.0
    for size in range(1, _NUM_FEATURES + 1):
        for support in combinations(range(_NUM_FEATURES), size):
            solution = _solve(gram, moments, support)
            if min(solution) < 0.0:
                continue
            # At the minimum over a support the squared error is smaller by this than with zeros.
            gain = sum(solution[i] * moments[i] for i in support)
            if gain > best_gain:
                best, best_gain = solution, gain
    return best[0], best[1], best[2]


def _solve(gram: list[list[float]], moments: list[float], support: tuple[int, ...]) -> list[float]:
    """Solves the normal equations of a support by elimination; other coefficients are 0. Singular: a negative one."""
    rows = [[gram[i][j] for j in support] + [moments[i]] for i in support]
    size = len(support)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) <= 1e-12 * abs(gram[support[column]][support[column]]):
            return [-1.0] * _NUM_FEATURES
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [x - factor * y for x, y in zip(rows[row], rows[column], strict=True)]
    solution = [0.0] * _NUM_FEATURES
    for column, index in enumerate(support):
        solution[index] = rows[column][size] / rows[column][column]
    return solution
