"""The file in which a comparison of strategies keeps its figures, so that the next run goes on from there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sluice_core.planning.slider_candidates import SliderCandidate

if TYPE_CHECKING:
    from pathlib import Path

    from sluice_cli.simulation.strategy_cells import StrategyCell


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """How much is simulated.

    Args:
        strategies: Their names.
        seeds: Of the goodputs.
        scale: Scales the length of the runs. Short ones flatter: queues hardly begin to grow.
        num_processes: Processes to use.
    """

    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    scale: float
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFigures:
    """What was measured of a strategy.

    Args:
        sliders: Its tuned sliders; None: it meets the objectives at no rate.
        goodputs_rps: Goodput of each seed, in requests/s.
    """

    sliders: SliderCandidate | None
    goodputs_rps: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class CellFigures:
    """What was measured on a cell; mutable: strategies come one after the other.

    Args:
        cell: The cell.
        duration_s: Length of a run; None: not decided yet.
        strategies: By name.
    """

    cell: StrategyCell
    duration_s: float | None = None
    strategies: dict[str, StrategyFigures] = field(default_factory=dict)


class ComparisonFile:
    """The file that figures are kept in; mutable with it.

    Args:
        path: The file; one that is there is gone on with.
        settings: They must be those of the file.

    Raises:
        ValueError: The file is of another comparison.
    """

    def __init__(self, path: Path, settings: ComparisonSettings) -> None:
        self._path = path
        self._content: dict[str, Any] = {"seeds": list(settings.seeds), "scale": settings.scale, "cells": {}}
        if not path.exists():
            return
        try:
            read = json.loads(path.read_text())
            measured = {name: read[name] for name in ("seeds", "scale")}
            self._content["cells"] = dict(read["cells"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no file of figures; name another one with --results") from error
        if any(self._content[name] != value for name, value in measured.items()):
            said = f"--seeds {','.join(map(str, measured['seeds']))} --scale {measured['scale']:g}"
            raise ValueError(f"{path} was measured with {said}; say the same, or name another file with --results")

    def load(self, cell: StrategyCell) -> CellFigures:
        """Loads what is known of a cell.

        Raises:
            ValueError: A cell of that name was measured that is another one.
        """
        found = self._content["cells"].get(cell.name)
        if found is None:
            return CellFigures(cell=cell)
        if found["cell"] != json.loads(json.dumps(cell.describe())):
            raise ValueError(f"{self._path} has figures of another cell {cell.name}; name another file with --results")
        return CellFigures(
            cell=cell,
            duration_s=found["duration_s"],
            strategies={name: _read_figures(each) for name, each in found["strategies"].items()},
        )

    def store(self, figures: CellFigures) -> None:
        """Stores what is known of a cell."""
        self._content["cells"][figures.cell.name] = {
            "title": figures.cell.title,
            "cell": figures.cell.describe(),
            "duration_s": figures.duration_s,
            "strategies": {name: _write_figures(each) for name, each in figures.strategies.items()},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._content, indent=1) + "\n")
        part.replace(self._path)


def _write_figures(figures: StrategyFigures) -> dict[str, Any]:
    sliders = figures.sliders
    written = sliders and {slider.name: getattr(sliders, slider.name) for slider in fields(sliders)}
    return {"sliders": written, "goodputs_rps": list(figures.goodputs_rps)}


def _read_figures(data: dict[str, Any]) -> StrategyFigures:
    sliders = data["sliders"] and SliderCandidate(**data["sliders"])
    return StrategyFigures(sliders=sliders, goodputs_rps=tuple(data["goodputs_rps"]))
