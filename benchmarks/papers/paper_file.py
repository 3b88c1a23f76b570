"""The tables of a paper: what a TOML file of this folder holds. ``load_paper`` reads one."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.papers.findings import Band, PaperModel, PlotKind
from pydantic import Field, model_validator

from sluice_cli.simulation.cluster_spec import ClusterSpec, parse_engines
from sluice_cli.simulation.simulation_settings import SimulationSettings, change_settings
from sluice_core.records import Slo

FOLDER = Path(__file__).parent
PAPERS = ("taichi", "distserve", "flowprefill", "ecoserve")  # names of the TOML files, in the order of the document
SettingValues = dict[str, str | int | float]


class System(PaperModel):
    """One way to run the engines; in TOML ``STRATEGY ENGINES [PLACEMENT] [no_flow] [SETTING=VALUE ...]``.

    Args:
        strategy: Name.
        engines: As ``--engines`` of ``sluice simulate`` says it.
        placement: Where prefills run; None: as the strategy says.
        flow: False: requests decode where their prefill ran.
        settings: Settings of the simulator on top of the testbed's.
    """

    strategy: str
    engines: str
    placement: str | None = None
    flow: bool = True
    settings: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        strategy, engines, *rest = value.split()
        settings = tuple(word for word in rest if "=" in word)
        placements = [word for word in rest if word != "no_flow" and word not in settings]
        return {
            "strategy": strategy,
            "engines": engines,
            "placement": placements[0] if placements else None,
            "flow": "no_flow" not in rest,
            "settings": settings,
        }

    @property
    def name(self) -> str:
        """What tells it from the other systems of a cell."""
        return f"{self.strategy} {self}" if self.settings else self.strategy

    def __str__(self) -> str:
        placement = "" if self.placement is None else f", {self.placement.replace('_', ' ')}"
        return f"{self.engines}{placement}{''.join(f', {setting}' for setting in self.settings)}"


class PaperTestbed(PaperModel):
    """Engines and their requests.

    Args:
        model: Name.
        gpu: Name.
        tensor_parallel: GPUs per engine.
        trace: Name of a file in ``benchmarks/traces``, without its ending.
        slo: Objectives: TTFT and TPOT in seconds.
        duration_s: Length of a run.
        start_rps: Where a goodput search starts.
        settings: Settings of the simulator on top of the paper's.
        class_ttft_s: TTFT objectives by class of the trace, in seconds; empty: those of the trace, or of ``slo``.
        prompt_tokens: Every prompt has so many; None: as the trace says.
        output_tokens: Every request gets so many; None: as the trace says.
        description: What a chapter says of it; fields in braces.
    """

    model: str
    gpu: str
    tensor_parallel: int = 1
    trace: str
    slo: tuple[float, float]
    duration_s: float
    start_rps: float
    settings: SettingValues = Field(default_factory=dict)
    class_ttft_s: dict[str, float] = Field(default_factory=dict)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    description: str = (
        "{model} TP{tensor_parallel} on {gpu}, trace {trace}, TTFT {ttft_s:g} s, TPOT {tpot_ms:g} ms; "
        "{duration_s:g} s, seeds {seeds}"
    )

    def make_spec(self, system: System) -> ClusterSpec:
        """Makes the cell of a system."""
        changes = {**self.settings, "flow": "on" if system.flow else "off"}
        if system.placement is not None:
            changes["placement"] = system.placement
        return ClusterSpec(
            model=self.model,
            gpu=self.gpu,
            tensor_parallel=self.tensor_parallel,
            strategy=system.strategy,
            engines=parse_engines(system.engines),
            slo=Slo(ttft_s=self.slo[0], tpot_s=self.slo[1]),
            settings=change_settings(
                SimulationSettings(), [*(f"{name}={value}" for name, value in changes.items()), *system.settings]
            ),
        )


class GoodputCell(PaperTestbed):
    """A cell whose systems are compared by goodput.

    Args:
        name: As ``--only`` names it; the tuned cell is ``NAME-tuned``.
        title: Figure and cell.
        systems: With the paper's sliders; the last is the paper's own, the others are its baselines.
        paper_ratios: What the paper states of its system's goodput over each baseline's.
        ratios: Bands of these ratios; none for a baseline without a band.
        tuned_ratios: Bands of the tuned system over the untuned baselines.
        goodputs: Bands of the goodput of each system.
        is_plotted: Attainment is drawn against the rate, beyond the goodput too.
        is_per_gpu: Goodputs and their ratios are those of a GPU, where systems have different numbers of them.
        notes: What differs from the paper and why.
    """

    name: str
    title: str
    systems: tuple[System, ...]
    paper_ratios: tuple[Band, ...] = ()
    ratios: tuple[Band, ...] = ()
    tuned_ratios: tuple[Band, ...] = ()
    goodputs: tuple[Band, ...] = ()
    is_plotted: bool = True
    is_per_gpu: bool = False
    notes: tuple[str, ...] = ()

    def count_gpus(self, system: System) -> int:
        """Counts the GPUs that a goodput is divided by; 1: it is the whole system's."""
        num_engines = sum(group.count for group in parse_engines(system.engines))
        return num_engines * self.tensor_parallel if self.is_per_gpu else 1


class Stated(PaperModel):
    """What the paper states of a figure, and the band of a reproduction; None: nothing."""

    paper: Band | None = None
    band: Band | None = None


class TrialRow(Stated):
    """A row of an experiment: a system, measured once per seed.

    Args:
        name: As ratios and plots name it.
        system: What runs.
        label: What findings say of it; None: the system.
        testbed: Another testbed or cell than the experiment's.
        slo: Other objectives: TTFT and TPOT in seconds.
        rate_rps: Another rate than the experiment's.
        goodput_of: The rate is the goodput of this system at the same seed.
        duration_factor: Of the testbed's duration.
        settings: Settings of the simulator on top of the testbed's.
        num_engines: Engines with this prefill capacity.
        num_decodes: Decodes that run beside the prefill.
        is_shown: False: only ratios and plots use it.
        stated: By metric, where the row itself has more than one.
    """

    name: str
    system: System
    label: str | None = None
    testbed: str | None = None
    slo: tuple[float, float] | None = None
    rate_rps: float | None = None
    goodput_of: System | None = None
    duration_factor: float = 1.0
    settings: SettingValues = Field(default_factory=dict)
    num_engines: int = 1
    num_decodes: int = 0
    is_shown: bool = True
    stated: dict[str, Stated] = Field(default_factory=dict)


class RatioRow(Stated):
    """A metric of one row over that of another, seed by seed.

    Args:
        of: Name of a row.
        over: Name of a row.
        metric: Of both.
        label: What the finding says; None: the names.
        quantity: What was compared; None: as the metric says.
    """

    of: str
    over: str
    metric: str
    label: str | None = None
    quantity: str | None = None


class SeriesRow(PaperModel):
    """A series of a plot.

    Args:
        name: In the legend.
        rows: Rows drawn: a bar each, or the points of one row's first seed.
        metric: Height of a bar; in a plot of points None.
        is_share_of_slo: Bars are shares of the objective.
        scale: Divides the height of bars.
        digits: Digits that x and y keep; bars have only a y.
        is_fit: The line through the points, in place of them.
    """

    name: str
    rows: tuple[str, ...]
    metric: str | None = None
    is_share_of_slo: bool = False
    scale: float = 1.0
    digits: tuple[int, int] = (0, 3)
    is_fit: bool = False


class PlotTable(PaperModel):
    """A plot; its fields are those of ``findings.Plot``."""

    name: str
    title: str
    x_label: str = ""
    y_label: str
    kind: PlotKind = PlotKind.BARS
    series: tuple[SeriesRow, ...]
    ticks: tuple[str, ...] = ()
    guides_x: tuple[float, ...] = ()
    guides_y: tuple[float, ...] = ()


class ExperimentTable(PaperModel):
    """An experiment: rows, what is measured of each, and what of it is compared and drawn.

    Args:
        name: As ``--only`` names it.
        title: What the paper calls it.
        testbed: Name of a testbed or a cell.
        setting: What was run; None: the testbed's description.
        rate_rps: Requests per second.
        observe: A name of ``observations.OBSERVERS``.
        seeds: One run for each; None: those of the command line.
        metrics: Names of ``observations.METRICS``.
        rows: What runs.
        at_goodput_of: Cells; each adds a row ``CELL STRATEGY`` for every system, at the goodput of the cell's last one.
        ratios: What is compared.
        notes: What differs from the paper and why.
        plots: Pictures.
    """

    name: str
    title: str
    testbed: str
    setting: str | None = None
    rate_rps: float | None = None
    observe: str = "trial"
    seeds: tuple[int, ...] | None = None
    metrics: tuple[str, ...]
    rows: tuple[TrialRow, ...] = ()
    at_goodput_of: tuple[str, ...] = ()
    ratios: tuple[RatioRow, ...] = ()
    notes: tuple[str, ...] = ()
    plots: tuple[PlotTable, ...] = ()


class Grid(PaperModel):
    """Systems to tune over: a template and the values of its fields; the last field varies fastest."""

    system: str
    values: dict[str, tuple[str | int, ...]] = Field(default_factory=dict)

    def list_systems(self) -> list[System]:
        """Lists the systems."""
        fields = (dict(zip(self.values, values, strict=True)) for values in product(*self.values.values()))
        return [System.model_validate(self.system.format(**of_system)) for of_system in fields]


class Paper(PaperModel):
    """A paper.

    Args:
        introduction: Markdown under the paper's heading.
        testbeds: By name.
        grids: By strategy.
        cells: Compared by goodput.
        experiments: The others.
        order: Names of experiments as the document has them: ``CELL`` has the paper's sliders,
            ``CELL-tuned`` tuned ones.
    """

    introduction: str
    testbeds: dict[str, PaperTestbed] = Field(default_factory=dict)
    grids: dict[str, tuple[Grid, ...]] = Field(default_factory=dict)
    cells: tuple[GoodputCell, ...] = ()
    experiments: tuple[ExperimentTable, ...] = ()
    order: tuple[str, ...]

    def find_testbed(self, name: str) -> PaperTestbed:
        """Finds a testbed or a cell."""
        return {**self.testbeds, **{cell.name: cell for cell in self.cells}}[name]

    def list_rows(self, table: ExperimentTable) -> list[TrialRow]:
        """Lists the rows of an experiment, those of its cells included."""
        of_cells = [
            TrialRow(
                name=f"{cell.name} {system.strategy}",
                system=system,
                testbed=cell.name,
                goodput_of=cell.systems[-1],
                is_shown=False,
            )
            for cell in self.cells
            if cell.name in table.at_goodput_of
            for system in cell.systems
        ]
        return [*table.rows, *of_cells]

    def list_grid(self, strategy: str) -> list[System]:
        """Lists the systems that a strategy is tuned over."""
        return [system for grid in self.grids[strategy] for system in grid.list_systems()]


def load_paper(name: str) -> Paper:
    """Reads the tables of a paper; its settings are under those of each testbed and cell."""
    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    settings, defaults = tables.pop("settings", {}), tables.pop("cell_defaults", {})
    tables["cells"] = [{**defaults, **cell} for cell in tables.get("cells", ())]
    for testbed in (*tables.get("testbeds", {}).values(), *tables.get("cells", [])):
        testbed["settings"] = {**settings, **testbed.get("settings", {})}
    return Paper.model_validate(tables)
