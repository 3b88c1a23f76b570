"""What strategies do besides batching, counted on both sides: moves by cause, and what else is typical of each.

A count of the router or of an engine has its metric's name: prompts that were cut (DynaServe), started prefills that
made way (FlowPrefill), changes between prefills and decodes (EcoServe).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.emulated.phases import Phase
    from benchmarks.local_cluster.client import BenchmarkClient
    from benchmarks.local_cluster.cluster import BenchmarkCluster

    from sluice_core.sim.simulation import Simulation

CUT_PROMPTS = "cut_prompts"
MOVED = "moved"  # of a cut prompt: its rest was computed elsewhere
SUSPENDED_PREFILLS, PHASE_SWITCHES = "suspended_prefills", "phase_switches"


async def read_engine_events(cluster: BenchmarkCluster, client: BenchmarkClient) -> Counter[str]:
    """Reads what all engines together have counted since their start.

    Args:
        cluster: The cluster.
        client: Reads metrics.
    """
    counts: Counter[str] = Counter()
    for record in cluster.read_processes("engine").values():
        metrics = await client.read_metrics(record["ports"]["metrics"])
        for name in (SUSPENDED_PREFILLS, PHASE_SWITCHES):
            counts[name] += int(metrics[f"sluice_engine_{name}_total", ()])
    return counts


def count_emulated(phase: Phase, engine_events: Counter[str]) -> dict[str, int]:
    """Counts what came of a load on emulated engines; zeros are left out.

    Args:
        phase: The load.
        engine_events: What the engines counted meanwhile.
    """
    num_cut = int(phase.counters[CUT_PROMPTS].get((MOVED,), 0))
    return _keep_positive({**phase.count_moves(), CUT_PROMPTS: num_cut, **engine_events})


def count_simulated(simulation: Simulation) -> dict[str, int]:
    """Counts what came of a simulation; zeros are left out."""
    selectors = [engine.selector for engine in simulation.engines if engine.selector is not None]
    phases = [engine.policy.describe_phase(simulation.now, is_prefilling=False) for engine in simulation.engines]
    return _keep_positive(
        {
            **{cause.value: count for cause, count in simulation.num_moves.items()},
            CUT_PROMPTS: simulation.num_cut,
            SUSPENDED_PREFILLS: sum(selector.num_suspended for selector in selectors),
            PHASE_SWITCHES: sum(phase.num_switches for phase in phases if phase is not None),
        }
    )


def _keep_positive(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
