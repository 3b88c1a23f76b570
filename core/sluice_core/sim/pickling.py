"""Lets records go between processes: compiled classes do not pickle by themselves. Importing this module is enough."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from typing import Any

from sluice_core.records import Slo, SloClass
from sluice_core.sim.metrics import EngineUse, RunSummary

RECORDS: tuple[type[Any], ...] = (Slo, SloClass, EngineUse, RunSummary)


def rebuild(record_type: type[Any], values: dict[str, Any]) -> Any:
    """Make a record of its fields."""
    return record_type(**values)


def _reduce(record: Any) -> tuple[Any, tuple[type[Any], dict[str, Any]]]:
    return rebuild, (type(record), {field.name: getattr(record, field.name) for field in fields(record)})


for _record_type in RECORDS:
    copyreg.pickle(_record_type, _reduce)
