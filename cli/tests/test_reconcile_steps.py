"""The next step towards what is desired: a matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice_cli.local_cluster.reconcile.reconcile_steps import (
    AddEngines,
    AddRouters,
    DesiredProcesses,
    ObservedProcesses,
    Recreate,
    RemoveEngines,
    RemoveRouter,
    RestartEngine,
    RestartRouter,
    RolloutStep,
    next_step,
)
from sluice_core.records import EngineId, Role

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
DESIRED = DesiredProcesses(
    compatibility_key="w", engine_hash="e", router_hash="r", num_engines=3, routers=("router-0",), num_prefill_heavy=1
)
WORKERS = replace(DESIRED, routers=("router-0", "router-0-1"))
OBSERVED = ObservedProcesses(
    compatibility_key="w",
    engines={A: "e", B: "e", C: "e"},
    routers={"router-0": "r"},
    roles={A: P, B: D, C: D},
    loads={},
    serving={A, B, C},
)


@pytest.mark.parametrize(
    ("observed", "desired", "step"),
    [
        (OBSERVED, DESIRED, None),
        (replace(OBSERVED, engines={}, routers={}), DESIRED, AddRouters(("router-0",))),
        (replace(OBSERVED, engines={}), DESIRED, AddEngines(3)),
        (OBSERVED, replace(DESIRED, num_engines=5), AddEngines(2)),
        (OBSERVED, replace(DESIRED, num_engines=2), RemoveEngines((C,))),
        (replace(OBSERVED, loads={B: 1, C: 2}), replace(DESIRED, num_engines=2), RemoveEngines((B,))),
        (OBSERVED, replace(DESIRED, num_engines=2, num_prefill_heavy=0), RemoveEngines((A,))),
        (OBSERVED, replace(DESIRED, num_engines=1, num_prefill_heavy=0), RemoveEngines((A, C))),
        (OBSERVED, replace(DESIRED, routers=("router-0", "router-1")), AddRouters(("router-1",))),
        (replace(OBSERVED, routers={"router-0": "r", "router-1": "r"}), DESIRED, RemoveRouter("router-1")),
        # A worker comes once the first one of its replica shares its ports, and leaves before that one has them alone.
        (OBSERVED, WORKERS, AddRouters(("router-0-1",))),
        (replace(OBSERVED, routers={"router-0": "old"}), WORKERS, RestartRouter("router-0")),
        (replace(OBSERVED, routers={}), WORKERS, AddRouters(("router-0",))),
        (replace(OBSERVED, routers={"router-0-1": "r"}), WORKERS, AddRouters(("router-0",))),
        (replace(OBSERVED, routers={"router-0": "old", "router-0-1": "old"}), DESIRED, RemoveRouter("router-0-1")),
        (OBSERVED, replace(DESIRED, engine_hash="new"), RestartEngine(A)),
        (replace(OBSERVED, engines={A: "new", B: "e", C: "e"}), replace(DESIRED, engine_hash="new"), RestartEngine(B)),
        (
            replace(OBSERVED, engines={A: "new", B: "e", C: "e"}, serving={B, C}),
            replace(DESIRED, engine_hash="new"),
            None,
        ),
        (
            replace(OBSERVED, engines={A: "bad", B: "e", C: "e"}, serving={B, C}),
            replace(DESIRED, engine_hash="new"),
            RestartEngine(A),
        ),
        (OBSERVED, replace(DESIRED, engine_hash="new", is_paused=True), None),
        (OBSERVED, replace(DESIRED, engine_hash="new", router_hash="new", is_paused=True), RestartRouter("router-0")),
        (OBSERVED, replace(DESIRED, router_hash="new"), RestartRouter("router-0")),
        (OBSERVED, replace(DESIRED, engine_hash="new", num_engines=2), RemoveEngines((C,))),
        (OBSERVED, replace(DESIRED, compatibility_key="new", num_engines=9), Recreate()),
    ],
)
def test_next_step(observed: ObservedProcesses, desired: DesiredProcesses, step: RolloutStep | None) -> None:
    assert next_step(observed, desired) == step
