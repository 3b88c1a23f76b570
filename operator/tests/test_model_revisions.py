"""An unpinned revision is resolved once, stored, and fetched by every pod."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from children_harness import engine_template, router_template
from cluster_harness import World

from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
from sluice_operator.api.labels import COMPONENT_LABEL
from sluice_operator.api.model_identity import identify_model, needs_resolution
from sluice_operator.api.names import ROUTER
from sluice_operator.kubernetes.kinds import CONFIG_MAPS, PODS
from sluice_operator.resources.pods.model_volume import RESOLVE_PROGRAM

if TYPE_CHECKING:
    from pathlib import Path

FIRST, LATER = "a" * 40, "b" * 40
HUB: dict[str, Any] = {"name": "org/model", "source": {"huggingFace": {}}}
KEY = f"model-revision-{identify_model(ModelSpec(**HUB))}"


@pytest.mark.parametrize(
    ("model", "is_open"),
    [
        (HUB, True),
        ({**HUB, "revision": "main"}, True),
        ({**HUB, "revision": "v1.0"}, True),
        ({**HUB, "revision": FIRST}, False),
        ({"name": "m", "source": {"persistentVolumeClaim": {"claimName": "models"}}}, False),
        ({"name": "m", "source": {"image": {"reference": "models/m:1"}}}, False),
    ],
)
def test_only_what_the_hub_may_move_is_resolved(model: dict[str, Any], *, is_open: bool) -> None:
    assert needs_resolution(ModelSpec(**model)) == is_open
    for template in (engine_template(model=model), router_template(model=model)):
        inits = [container["name"] for container in template["spec"].get("initContainers", [])]
        assert ("resolve-model" in inits) == is_open


def test_every_pod_fetches_the_revision_that_is_stored_and_waits_for_it() -> None:
    source = {"huggingFace": {"cacheClaimName": "cache"}}
    for template in (engine_template(model=HUB | {"source": source}), router_template(model=HUB | {"source": source})):
        resolve, fetch = template["spec"]["initContainers"]
        reference = {"name": "tiny-plan", "key": KEY}
        variable = {"name": "SLUICE_MODEL_REVISION", "valueFrom": {"configMapKeyRef": reference}}
        assert variable in fetch["env"]
        assert variable in template["spec"]["containers"][0]["env"]
        # The first one asks the Hub, a later one does not: it knows what is stored.
        assert resolve["env"][0]["valueFrom"]["configMapKeyRef"] == {**reference, "optional": True}
        assert "$(SLUICE_MODEL_REVISION)" in fetch["command"]
        mounts = [each for part in (fetch, template["spec"]["containers"][0]) for each in part["volumeMounts"]]
        folders = {mount["subPathExpr"] for mount in mounts if mount["name"] == "model"}
        assert len(folders) == 1
        assert folders.pop().startswith("org--model--$(SLUICE_MODEL_REVISION)")


def answer(world: World, name: str, revision: str) -> None:
    """The pod's first container says what the Hub answered."""
    ended = {"name": "resolve-model", "state": {"terminated": {"exitCode": 0, "message": revision}}}
    world.kubernetes.edit(PODS, name, {"status": {"initContainerStatuses": [ended]}})


async def test_the_first_answer_counts_for_all_pods_and_for_the_next_operator() -> None:
    world = World(model=HUB)
    await world.settle()

    def stored() -> Any:
        return world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["data"].get(KEY)

    assert stored() is None
    first, second, *_ = [pod["metadata"]["name"] for pod in world.engines]
    answer(world, second, "what a proxy answers")
    await world.settle()
    assert stored() is None
    answer(world, first, FIRST)
    await world.settle()
    assert stored() == FIRST
    answer(world, first, LATER)
    answer(world, second, LATER)
    world.start_operator()
    await world.settle()
    assert stored() == FIRST
    world.edit(slo={"tpotMilliseconds": 100})
    await world.settle()
    assert stored() == FIRST


async def test_the_answer_of_a_router_counts_as_that_of_an_engine_does() -> None:
    world = World(model=HUB)
    await world.settle()
    router = world.kubernetes.select(PODS, labels={COMPONENT_LABEL: ROUTER})[0]
    answer(world, router["metadata"]["name"], FIRST)
    await world.settle()
    assert world.kubernetes.find(CONFIG_MAPS, "tiny-plan")["data"].get(KEY) == FIRST


async def test_a_pod_that_waits_for_the_revision_is_no_fault() -> None:
    world = World(model=HUB)
    await world.settle()
    reason = {"reason": "CreateContainerConfigError", "message": f"couldn't find key {KEY} in ConfigMap x/tiny-plan"}
    waiting = [{"name": "fetch-model", "ready": False, "state": {"waiting": reason}}]
    world.kubernetes.edit(PODS, world.engines[0]["metadata"]["name"], {"status": {"initContainerStatuses": waiting}})
    await world.settle()
    assert world.conditions["Degraded"] == ("False", "AsExpected")


def resolve(tmp_path: Path, known: str) -> str:
    """Runs the program of the first container against a Hub that answers LATER."""
    (tmp_path / "huggingface_hub.py").write_text(
        f"class HfApi:\n    def model_info(self, name, revision):\n"
        f"        assert (name, revision) == ('org/model', None)\n"
        f"        return type('Info', (), {{'sha': '{LATER}'}})\n"
    )
    log = tmp_path / "termination-log"
    program = RESOLVE_PROGRAM.replace("/dev/termination-log", str(log))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "SLUICE_MODEL_REVISION": known}
    subprocess.run([sys.executable, "-c", program, "org/model", ""], env=environment, check=True)
    return log.read_text()


def test_the_program_asks_the_hub_only_where_nothing_is_stored(tmp_path: Path) -> None:
    assert resolve(tmp_path, "") == LATER
    assert resolve(tmp_path, FIRST) == FIRST
