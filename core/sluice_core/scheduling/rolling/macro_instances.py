"""Macro instances: groups of engines, each with a rotation of its own, that split and merge as engines come and go.

Source: EcoServe (arXiv:2504.18154), section 3.5.1 (mitosis). The groups follow from the list of engines alone, so a
split or a merge moves no engine, no request and no KV: it changes in which order a router offers requests to engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice_core.scheduling.engine_state import EngineState


def divide_engines(num_engines: int, least: int, most: int) -> list[list[int]]:
    """Divide engines into macro instances as if they had been added one by one.

    An engine joins the oldest macro instance that is not full. Where all are, the oldest of the youngest ``most``
    engines' macro instance grows by it and splits off one of ``least``.

    Args:
        num_engines: Engines, numbered from 0 in the order in which they came.
        least: N_l, engines of a macro instance that is split off; at least 1.
        most: N_u, most engines of one; ``2 * least - 1`` where it is less, so that both parts have ``least``.

    Returns:
        Their numbers by macro instance, the oldest first.

    Source: EcoServe, section 3.5.1 and Figure 7, steps 1 to 4.
    """
    most = max(most, 2 * least - 1)
    groups: list[list[int]] = [[]]
    open_ = 0  # the oldest that is not full
    for number in range(num_engines):
        while open_ < len(groups) and len(groups[open_]) >= most:
            open_ += 1
        if open_ < len(groups):
            groups[open_].append(number)
            continue
        whole = [*groups[-1], number]
        groups[-1:] = [whole[:-least], whole[-least:]]
        open_ = len(groups) - 2
    return groups if num_engines else []


class MacroInstance:
    """Engines among which requests go round; mutable, changed by ``MacroInstances`` only.

    Attributes:
        engines: In the order of the rotation.
        position: Of the engine that took the last request.
        num_tokens: Prompt tokens placed here since the groups last changed.
    """

    __slots__ = ("engines", "num_tokens", "position")

    def __init__(self, engines: list[EngineState], position: int) -> None:
        self.engines = engines
        self.position = position
        self.num_tokens = 0


class MacroInstances:
    """The macro instances of one router; mutable.

    Args:
        least: See ``divide_engines``.
        most: See there.

    Attributes:
        groups: The macro instances, the oldest first.
        num_splits: Times that one became two since ``take_changes``.
        num_merges: Times that two became one since then.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self.groups: list[MacroInstance] = []
        self.num_splits = 0
        self.num_merges = 0
        self._numbers: list[int] = []
        self._taken: dict[int, int] = {}  # by number of an engine: which placement was its last one
        self._num_taken = 0

    def renew(self, engines: Sequence[EngineState]) -> None:
        """Take the engines that there are now: O(engines).

        Args:
            engines: In the order in which they came to the router.
        """
        numbers = [engine.number for engine in engines]
        if numbers == self._numbers:
            return
        had_engines = bool(self._numbers)
        self._numbers = numbers
        self._taken = {number: self._taken.get(number, -1) for number in numbers}
        num_groups = len(self.groups)
        self.groups = []
        for positions in divide_engines(len(engines), self._least, self._most):
            members = [engines[position] for position in positions]
            # The rotation goes on where it was: at the engine that took the last request of all its members.
            last = max(range(len(members)), key=lambda each: self._taken[members[each].number])
            self.groups.append(MacroInstance(members, last if self._taken[members[last].number] >= 0 else 0))
        if had_engines and numbers:
            self.num_splits += max(0, len(self.groups) - num_groups)
            self.num_merges += max(0, num_groups - len(self.groups))

    def take_changes(self) -> list[str]:
        """Return the splits and merges since the last call, by name."""
        changes = ["macro_instance_split"] * self.num_splits + ["macro_instance_merge"] * self.num_merges
        self.num_splits = self.num_merges = 0
        return changes

    def list_by_load(self) -> list[MacroInstance]:
        """List the macro instances, the one first that got the fewest prompt tokens per engine."""
        if len(self.groups) <= 1:
            return self.groups
        return sorted(self.groups, key=lambda group: group.num_tokens / len(group.engines))

    def note_placement(self, group: MacroInstance, position: int, tokens: int) -> None:
        """Note that an engine took a request.

        Args:
            group: Its macro instance.
            position: Its position there.
            tokens: Prompt tokens of the request.
        """
        group.position = position
        group.num_tokens += tokens
        self._num_taken += 1
        self._taken[group.engines[position].number] = self._num_taken
