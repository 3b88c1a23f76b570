"""The next step towards what is wanted: a matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice_cli.local_cluster.rollout_steps import (
    AddEngines,
    AddRouters,
    Recreate,
    RemoveEngines,
    RemoveRouter,
    RollEngine,
    RollRouter,
    Running,
    Step,
    Wanted,
    next_step,
)
from sluice_core.records import EngineId, Role

P, D = Role.PREFILL_HEAVY, Role.DECODE_HEAVY
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
WANTED = Wanted(world="w", engine="e", router="r", num_engines=3, num_routers=1, num_prefill_heavy=1)
RUNNING = Running(
    world="w", engines={A: "e", B: "e", C: "e"}, routers={"router-0": "r"}, roles={A: P, B: D, C: D}, loads={}
)


@pytest.mark.parametrize(
    ("running", "wanted", "step"),
    [
        (RUNNING, WANTED, None),
        (replace(RUNNING, engines={}, routers={}), WANTED, AddRouters(1)),
        (replace(RUNNING, engines={}), WANTED, AddEngines(3)),
        (RUNNING, replace(WANTED, num_engines=5), AddEngines(2)),
        (RUNNING, replace(WANTED, num_engines=2), RemoveEngines((C,))),
        (replace(RUNNING, loads={B: 1, C: 2}), replace(WANTED, num_engines=2), RemoveEngines((B,))),
        (RUNNING, replace(WANTED, num_engines=2, num_prefill_heavy=0), RemoveEngines((A,))),
        (RUNNING, replace(WANTED, num_engines=1, num_prefill_heavy=0), RemoveEngines((A, C))),
        (RUNNING, replace(WANTED, num_routers=2), AddRouters(1)),
        (replace(RUNNING, routers={"router-0": "r", "router-1": "r"}), WANTED, RemoveRouter("router-1")),
        (RUNNING, replace(WANTED, engine="new"), RollEngine(A)),
        (replace(RUNNING, engines={A: "new", B: "e", C: "e"}), replace(WANTED, engine="new"), RollEngine(B)),
        (RUNNING, replace(WANTED, router="new"), RollRouter("router-0")),
        (RUNNING, replace(WANTED, engine="new", num_engines=2), RemoveEngines((C,))),
        (RUNNING, replace(WANTED, world="new", num_engines=9), Recreate()),
    ],
)
def test_next_step(running: Running, wanted: Wanted, step: Step | None) -> None:
    assert next_step(running, wanted) == step
