"""The page of metrics lists what engine and operator export; router/tests checks the router's part of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest

from sluice_engine.server.prometheus_metrics import EngineCollector
from sluice_operator.metrics import OperatorMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(\S+)` \| (histogram|counter|gauge) \| .+ \|$", re.MULTILINE)
# Of the engine's server, only the names of its metrics matter here.
PROGRAMS = {"Engine": EngineCollector(MagicMock()).collect(), "Operator": OperatorMetrics().registry.collect()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_lists_every_metric(program: str) -> None:
    families: Iterable[Metric] = PROGRAMS[program]
    exported = {(family.name + "_total" * (family.type == "counter"), family.type) for family in families}
    section = PAGE.partition(f"## {program}\n")[2].partition("\n## ")[0]
    assert set(ROW.findall(section)) == exported
