"""One model replaces another: how far the fleet is split, when the routers switch, and the whole of it in fakes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from children_harness import engine_template, router_template
from cluster_harness import World

from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.fields_and_defaults.rollout_spec import RolloutSpec
from sluice_operator.api.labels import COMPONENT_LABEL, MODEL_LABEL
from sluice_operator.api.model_identity import identify_model
from sluice_operator.kubernetes.kinds import PODS, SERVICES
from sluice_operator.planning.model_switch import SplitStep, split_fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice_operator.kubernetes.objects import Object

VOLUME = {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}
OLD = identify_model(ModelSpec(name="tiny", source=VOLUME))
NEW = identify_model(ModelSpec(name="other", source=VOLUME))

# maxSurge, maxUnavailable, replicas, new engines that serve: engines that must serve, engines that may be away.
STEPS: dict[str, tuple[Any, Any, int, int, tuple[int, int]]] = {
    "no spares, first step": (0, 1, 4, 0, (2, 1)),
    "no spares, second step": (0, 1, 4, 1, (2, 2)),
    "no spares, half": (0, 1, 4, 2, (2, 2)),
    "no spares, odd": (0, 1, 5, 2, (3, 3)),
    "steps of a quarter": (0, "25%", 16, 0, (8, 4)),
    "steps of a quarter, later": (0, "25%", 16, 4, (8, 8)),
    "a step that is rounded to none": (0, "10%", 4, 0, (2, 1)),
    "one spare comes first": (1, 0, 4, 0, (2, 0)),
    "one spare, then a step": (1, 0, 4, 1, (2, 1)),
    "as many spares as engines": ("100%", 0, 4, 0, (4, 0)),
    "a share of spares is rounded up": ("20%", 0, 4, 0, (2, 0)),
    "a share of spares, then a step": ("20%", 0, 4, 1, (2, 1)),
    "most of the engines as spares": ("60%", 0, 5, 0, (3, 0)),
    "more spares than engines": (9, 0, 4, 0, (4, 0)),
    "one engine": (0, 1, 1, 0, (1, 1)),
    "one engine and a spare": (1, 0, 1, 0, (1, 0)),
}


@pytest.mark.parametrize(("surge", "unavailable", "replicas", "num_ready", "step"), STEPS.values(), ids=STEPS)
def test_spares_come_first_and_half_of_the_fleet_is_split_step_by_step(
    surge: Any, unavailable: Any, replicas: int, num_ready: int, step: tuple[int, int]
) -> None:
    rollout = RolloutSpec(maxSurge=surge, maxUnavailable=unavailable)
    num_needed, max_unavailable = step
    assert split_fleet(rollout, replicas, num_ready) == SplitStep(
        num_needed=num_needed, max_unavailable=max_unavailable
    )


class SwitchingWorld(World):
    """Notes, at each step, which model routers and engines serve."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.seen: list[tuple[int, int, int, int, str]] = []
        # Routers that finish their streams: their pods stay until told otherwise.
        self.are_busy = False

    def count(self, component: str, model: str, is_counted: Callable[[Object], bool] = lambda _: True) -> int:
        pods = self.kubernetes.select(PODS, labels={COMPONENT_LABEL: component, MODEL_LABEL: model})
        return sum("deletionTimestamp" not in pod["metadata"] and is_counted(pod) for pod in pods)

    def run_controllers(self) -> None:
        super().run_controllers()
        self.seen.append(
            (
                self.count("engine", OLD),
                self.count("engine", NEW),
                self.count("router", OLD),
                self.count("router", NEW),
                self.chosen,
            )
        )

    @property
    def chosen(self) -> str:
        """Model of the routers that the clients' Service chooses; empty: any."""
        if not any(name == "tiny-router" for _, _, name in self.kubernetes.objects):
            return ""
        selector = self.kubernetes.find(SERVICES, "tiny-router")["spec"]["selector"]
        return str(selector.get(MODEL_LABEL, ""))

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(model.model_id, model.served_name) for model in self.plan.served_models]


@pytest.mark.parametrize(("template", "program"), [(engine_template, "SLUICE"), (router_template, "SLUICE_ROUTER")])
def test_pods_know_the_model_that_they_serve(template: Any, program: str) -> None:
    rendered = template()
    variables = {item["name"]: item.get("value") for item in rendered["spec"]["containers"][0]["env"]}
    assert variables[f"{program}_MODEL_ID"] == rendered["metadata"]["labels"][MODEL_LABEL] == OLD


@pytest.mark.parametrize("change", [{"name": "other"}, {"revision": "b"}, {"servedName": "mine", "revision": "b"}])
async def test_routers_switch_when_half_of_the_engines_are_new_and_no_request_is_without_engines(change: Any) -> None:
    world = SwitchingWorld()
    await world.settle()
    world.edit(model=change)
    new = identify_model(ModelSpec(**{"name": "tiny", "source": VOLUME, **change}))
    seen = []
    for _ in range(40):
        world.run_controllers()
        await world.reconcile()
        world.now += 1.0
        counts = {
            (component, model): world.count(component, model)
            for component in ("engine", "router")
            for model in (OLD, new)
        }
        # Routers that run have engines of their own model.
        assert not counts["router", OLD] or counts["engine", OLD] >= 2
        assert not counts["router", new] or counts["engine", new] >= 2
        assert sum(counts["engine", model] for model in (OLD, new)) <= 4
        # The name for clients never stands for the other model's weights.
        served = dict(world.names)
        assert served.get(OLD, "tiny") == "tiny"
        assert served.get(new) in (None, change.get("servedName") or change.get("name") or "tiny")
        seen.append(counts["engine", OLD])
    assert {4, 3, 2} <= set(seen)
    assert world.count("engine", new) == 4
    assert world.count("router", new) == 2
    assert world.names == [(new, change.get("servedName") or change.get("name") or "tiny")]
    assert world.conditions["Progressing"] == ("False", "Settled")
    assert world.conditions["SpecValid"] == ("True", "Valid")


async def test_with_spares_no_old_engine_leaves_before_the_switch() -> None:
    world = SwitchingWorld(rollout={"maxSurge": "100%", "maxUnavailable": 0})
    await world.settle()
    world.edit(model={"name": "other"})
    await world.settle()
    before = [(old, new) for old, new, _, new_routers, _ in world.seen if not new_routers and new]
    assert (4, 4) in before
    assert {old for old, _ in before} == {4}
    assert world.count("engine", NEW) == 4
    assert not world.count("engine", OLD)


async def test_new_connections_go_to_one_model_at_a_time() -> None:
    world = SwitchingWorld()
    await world.settle()
    world.edit(model={"name": "other"})
    await world.settle()
    chosen = [model for *_, model in world.seen]
    turns = [model for before, model in zip(["", *chosen], chosen, strict=False) if model != before]
    assert turns == [OLD, NEW, ""]


async def test_a_model_that_does_not_start_takes_no_request_and_no_more_than_one_step() -> None:
    world = SwitchingWorld()
    await world.settle()
    world.kubernetes.broken_images.add("broken:1")
    world.edit(model={"name": "other"}, engine={"image": "broken:1"})
    await world.settle()
    assert (world.count("engine", OLD), world.count("engine", NEW)) == (3, 1)
    assert (world.count("router", OLD), world.count("router", NEW)) == (2, 0)
    assert world.names == [(OLD, "tiny")]
    # The edit back ends it: what served before serves on.
    world.edit(model={"name": "tiny"}, engine={"image": None})
    await world.settle()
    assert (world.count("engine", OLD), world.count("engine", NEW)) == (4, 0)
    assert world.conditions["Progressing"] == ("False", "Settled")


async def test_a_new_operator_goes_on_where_the_last_one_stopped() -> None:
    plain, restarted = SwitchingWorld(), SwitchingWorld()
    for world in (plain, restarted):
        await world.settle()
        world.edit(model={"name": "other"})
        for _ in range(40):
            world.run_controllers()
            await world.reconcile()
            world.now += 1.0
            if world is restarted:
                world.start_operator()
    assert restarted.names == plain.names == [(NEW, "other")]
    assert restarted.count("engine", NEW) == plain.count("engine", NEW) == 4


async def test_each_model_has_both_roles_while_the_fleet_is_split() -> None:
    world = SwitchingWorld(rollout={"maxSurge": "100%", "maxUnavailable": 0})
    await world.settle()
    world.edit(model={"name": "other"})
    for _ in range(30):
        world.run_controllers()
        await world.reconcile()
        world.now += 1.0
        if (world.count("engine", OLD), world.count("engine", NEW)) == (4, 4):
            break
    await world.reconcile()
    roles: dict[str, list[int]] = {OLD: [], NEW: []}
    models = {pod["metadata"]["uid"]: pod["metadata"]["labels"][MODEL_LABEL] for pod in world.engines}
    for part in world.plan.engines:
        roles[models[part.engine_id]].append(part.role)
    assert sorted(roles[OLD]) == sorted(roles[NEW]) == [1, 1, 2, 2]
