"""Lets records go between processes: compiled classes do not pickle by themselves. Importing this module is enough."""

from __future__ import annotations

import copyreg
from dataclasses import fields
from typing import Any

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.transfer import LinkSpeed
from sluice_core.records import Slo, SloClass
from sluice_core.sim.run_summary import EngineUse, RunSummary
from sluice_core.sim.sim_setup import EngineSetup, RouterSetup, SimOptions, TransferLink
from sluice_core.sim.traces import TraceRow
from sluice_core.strategies.disaggregated import DisaggregatedPolicies
from sluice_core.strategies.dynaserve import DynaServeRules
from sluice_core.strategies.ecoserve import EcoServeRules
from sluice_core.strategies.flowprefill import FlowPrefillRules
from sluice_core.strategies.interface import SliderUse, Strategy
from sluice_core.strategies.role_policies import FlowRules
from sluice_core.strategies.sluice import SluiceRules
from sluice_core.strategy_parameters import Parameter, StrategyParameters

RECORDS: tuple[type[Any], ...] = (
    DisaggregatedPolicies,
    DynaServeRules,
    EcoServeRules,
    EngineSetup,
    EngineUse,
    StrategyParameters,
    FlowPrefillRules,
    FlowRules,
    IterationProfile,
    TransferLink,
    LinkSpeed,
    Parameter,
    RouterSetup,
    RunSummary,
    SimOptions,
    SliderUse,
    Slo,
    SluiceRules,
    SloClass,
    Strategy,
    TraceRow,
)


def rebuild(record_type: type[Any], values: dict[str, Any]) -> Any:
    """Make a record of its fields."""
    return record_type(**values)


def _reduce(record: Any) -> tuple[Any, tuple[type[Any], dict[str, Any]]]:
    return rebuild, (type(record), {field.name: getattr(record, field.name) for field in fields(record)})


def register(*record_types: type[Any]) -> None:
    """Lets further records go between processes."""
    for record_type in record_types:
        copyreg.pickle(record_type, _reduce)


register(*RECORDS)
