"""Cells that strategies are compared on: a cluster, requests and objectives, from a file of cells or from flags."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice_cli.simulation.plan_inputs import PlanFlags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sluice_operator.api.serving_cluster import ServingCluster

# Fields of a cell in a file, and their types.
_FIELDS: Mapping[str, type] = {
    "title": str,
    "model": str,
    "gpu": str,
    "tensor_parallel": int,
    "trace": str,
    "replicas": int,
    "ttft_ms": int,
    "tpot_ms": int,
    "set": list,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCell:
    """A cell.

    Args:
        name: Short.
        title: What it is, for people.
        trace: File of the requests.
        flags: The cluster and its objectives, as ``sluice plan`` takes them.
        manifest: What flags change; None: they say everything.
    """

    name: str
    title: str
    trace: Path
    flags: PlanFlags
    manifest: ServingCluster | None = None

    def describe(self) -> dict[str, Any]:
        """Describes it as JSON, to notice that measured figures belong to another cell."""
        flags = {name: value for name, value in asdict(self.flags).items() if value not in (None, ())}
        manifest = self.manifest and self.manifest.model_dump(mode="json", exclude_defaults=True)["spec"]
        return {"trace": self.trace.name, "flags": flags, "manifest": manifest}

    def change(self, changes: tuple[str, ...]) -> StrategyCell:
        """Returns the same cell with further settings, as ``NAME=VALUE``; the last one of a name counts."""
        return replace(self, flags=replace(self.flags, changes=(*self.flags.changes, *changes)))


def load_cells(path: Path, only: Sequence[str]) -> list[StrategyCell]:
    """Loads the cells of a file; traces are found from its folder.

    Args:
        path: TOML, with a table ``cells``.
        only: Names of those that are wanted; empty: all.

    Raises:
        ValueError: The file or a cell in it is wrong; names it.
    """
    try:
        tables = tomllib.loads(path.read_text())["cells"]
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; run this in a checkout of Sluice, name a file of cells "
            "with --cells, or your own requests with --trace"
        ) from error
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ValueError(f"{path} is no TOML file with a table of cells: {error}") from error
    unknown = [name for name in only if name not in tables]
    if unknown:
        raise ValueError(f"{path} has no cell {', '.join(unknown)}; it has {', '.join(tables)}")
    return [_read_cell(path, name, tables[name]) for name in tables if not only or name in only]


def _read_cell(path: Path, name: str, table: Mapping[str, Any]) -> StrategyCell:
    wrong = [field for field, kind in _FIELDS.items() if not isinstance(table.get(field), kind)]
    if wrong:
        fields = ", ".join(f"{field} ({_FIELDS[field].__name__})" for field in wrong)
        raise ValueError(f"{path}, cell {name}: {fields} is missing or of another type")
    return StrategyCell(
        name=name,
        title=table["title"],
        trace=path.parent / table["trace"],
        flags=PlanFlags(
            model=table["model"],
            gpu=table["gpu"],
            tensor_parallels=(table["tensor_parallel"],),
            replicas=(table["replicas"], table["replicas"]),
            ttft_ms=table["ttft_ms"],
            tpot_ms=table["tpot_ms"],
            changes=tuple(table["set"]),
        ),
    )


def make_own_cell(trace: Path, flags: PlanFlags, manifest: ServingCluster | None) -> StrategyCell:
    """Makes a cell of the user's own requests."""
    title = "the manifest's engines" if manifest else f"{flags.model}, {flags.gpu}"
    return StrategyCell(
        name=trace.name.partition(".")[0], title=f"{title}, {trace.name}", trace=trace, flags=flags, manifest=manifest
    )
