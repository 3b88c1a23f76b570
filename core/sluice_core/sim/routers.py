"""Simulated routers: what each knows of the engines, and since when.

Each has an engine table, a queue and policies of its own. Engines tell every router whenever their load has changed.
With ``SimOptions.report_s`` a report arrives that much later, and until then the router decides on the last one. As in
the product an engine is in the share of one router, and says so in its reports.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice_core.latency import LatencyModel
from sluice_core.latency.scaled_latency_model import scale_latency
from sluice_core.records import EngineId, PrefillRequest, RequestId
from sluice_core.router_shares import choose_owner
from sluice_core.scheduling.engine_state import EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig, EngineTable
from sluice_core.sim.sim_setup import Cell, EngineSetup, RouterSetup
from sluice_core.strategies.interface import RouterPolicy


@dataclass(slots=True, kw_only=True, eq=False)
class _LateReport:
    """A message on its way from an engine to a router.

    Args:
        arrives_at_s: When it is there.
        engine_id: Who sent it.
        load: The load; None: the answer to a question for a grant.
        grant_id: That question.
    """

    arrives_at_s: float
    engine_id: EngineId
    load: EngineLoad | None
    grant_id: int


class SimRouter:
    """One router; mutable.

    Args:
        number: Its position among the routers.
        cell: The cluster.
        setup: What it is.
        rng: Breaks its ties.

    Attributes:
        policy: Decides.
        table: The engines as it knows them.
        held: Requests that wait to be placed, in the order in which they began to.
        last_assign_s: When the policy was asked last.
        is_retry_due: An event will have it asked again.
        reports: What is under way to here, in the order of arrival.
    """

    __slots__ = (
        "_factor",
        "_profiles",
        "held",
        "is_retry_due",
        "last_assign_s",
        "number",
        "policy",
        "reports",
        "router_id",
        "table",
    )

    def __init__(self, number: int, cell: Cell, setup: RouterSetup, rng: random.Random) -> None:
        self.number = number
        self.router_id = f"router-{number}"
        self.policy: RouterPolicy = cell.strategy.make_router(cell.parameters, rng, num_records=0)
        self._factor = setup.latency_factor
        self._profiles: dict[EngineId, LatencyModel] = {}
        self.table = EngineTable(self._profiles.__getitem__, counts_decodes=cell.options.counts_decodes)
        self.held: dict[RequestId, PrefillRequest] = {}
        self.last_assign_s = -1.0
        self.is_retry_due = False
        self.reports: deque[_LateReport] = deque()

    def add_engine(self, setup: EngineSetup, latency: LatencyModel) -> None:
        """Add an engine to the table; it knows of its iterations what the engine itself does, but for the factor."""
        self._profiles[setup.engine_id] = scale_latency(latency, self._factor)
        config = EngineConfig(
            block_size_tokens=setup.block_size_tokens,
            kv_bytes_per_token=setup.kv_bytes_per_token,
            max_num_seqs=setup.max_num_seqs,
            max_batch_tokens=setup.max_batch_tokens,
            cuts_prompts=True,
        )
        self.table.add(setup.engine_id, config, role=setup.role, chunk_size_tokens=setup.chunk_size_tokens)

    def send(self, engine_id: EngineId, load: EngineLoad, arrives_at_s: float) -> None:
        """Send a report to here that nobody changes any more."""
        self.reports.append(_LateReport(arrives_at_s=arrives_at_s, engine_id=engine_id, load=load, grant_id=0))

    def send_grant_answer(self, engine_id: EngineId, grant_id: int, arrives_at_s: float) -> None:
        """Send the answer to a question for a grant to here."""
        self.reports.append(_LateReport(arrives_at_s=arrives_at_s, engine_id=engine_id, load=None, grant_id=grant_id))

    def receive(self, now: float) -> None:
        """Take in what has arrived."""
        reports = self.reports
        while reports and reports[0].arrives_at_s <= now:
            report = reports.popleft()
            if report.engine_id not in self.table:
                continue  # it has died meanwhile
            if report.load is None:
                self.table.record_grant_answer(report.engine_id, report.grant_id)
            else:
                self.table.report(report.engine_id, report.load, report.arrives_at_s)


class SimRouters:
    """All routers of a cell, and which requests and engines are whose.

    Args:
        cell: The cluster.
        num_requests: Requests of the run.

    Attributes:
        routers: They, at least one.
        first: The first, which is all there is where nothing else is said.
    """

    def __init__(self, cell: Cell, num_requests: int) -> None:
        self.routers: list[SimRouter] = []
        for number, setup in enumerate(cell.routers):
            seed = cell.seed if number == 0 else f"{cell.seed} router {number}"
            rng = random.Random(seed)  # noqa: S311 - breaks ties
            self.routers.append(SimRouter(number, cell, setup, rng))
        self.first = self.routers[0]
        self._of_requests = _share_out(cell, num_requests)
        self._owners: dict[EngineId, str] = {}

    def of_request(self, index: int) -> SimRouter:
        """Return the router that a request came to."""
        return self.first if self._of_requests is None else self.routers[self._of_requests[index]]

    def add_engine(self, setup: EngineSetup, latency: LatencyModel) -> None:
        """Add an engine to all tables, and how long it takes its iterations to take."""
        for router in self.routers:
            router.add_engine(setup, latency)
        if len(self.routers) > 1:
            owner = choose_owner(setup.engine_id, [router.router_id for router in self.routers])
            self._owners[setup.engine_id] = owner

    def copy_loads(self, engine_id: EngineId, load: EngineLoad) -> Sequence[EngineLoad]:
        """Copy a load for each router; it says whether the engine is in the share of another one."""
        own = replace(load, is_of_others=False)
        if len(self.routers) == 1:
            return [own]
        of_others = replace(load, is_of_others=True)
        owner = self._owners[engine_id]
        return [own if router.router_id == owner else of_others for router in self.routers]


def _share_out(cell: Cell, num_requests: int) -> list[int] | None:
    """Draw the router of each request; None: there is one only."""
    if len(cell.routers) == 1:
        return None
    rng = random.Random(f"{cell.seed} routers")  # noqa: S311 - a workload
    weights = [setup.arrival_share for setup in cell.routers]
    return rng.choices(range(len(weights)), weights, k=num_requests)
