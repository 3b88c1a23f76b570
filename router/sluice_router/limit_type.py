"""The type of a limit that an option of the command line can change. Each limit stands in the module with its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

# Without a bound: mypyc would make a float of each number.
NumberT = TypeVar("NumberT")


class Limit(Generic[NumberT]):
    """A number of a rule.

    Args:
        name: The option's, with underscores.
        default: What holds without the option.
        description: What it limits, for ``--help``.
        above: Values must be greater; None: there is no such bound.
        at_least: Values must not be smaller; None: there is no such bound.
    """

    def __init__(
        self,
        name: str,
        default: NumberT,
        description: str,
        *,
        above: float | None = None,
        at_least: float | None = None,
    ) -> None:
        self.name = name
        self.default = default
        self.description = description
        self.above = above
        self.at_least = at_least


class Limits:
    """The limits in force: ``limits[MAX_DEATHS]``.

    Args:
        values: Checked ones; what is left out has its default.
    """

    def __init__(self, values: Mapping[Limit[Any], Any] | None = None) -> None:
        self._values: Mapping[Limit[Any], Any] = values or {}

    def __getitem__(self, limit: Limit[NumberT]) -> NumberT:
        """The value of a limit."""
        return cast("NumberT", self._values.get(limit, limit.default))
