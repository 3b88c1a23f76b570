"""The way to a next version of the API (docs/internals/crd-versions.md), walked with a copy of the CRD.

The copy has a group of its own. Its v1beta1 has the fields of v1alpha1 and no ``Off``; conversion is strategy None.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from testbed.errors import TestbedError
from testbed.settings import ROOT
from verdicts import make_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.client import Client

GROUP = "versions.sluice.dev"
PLURAL = f"servingclusters.{GROUP}"
OLD, NEW = "v1alpha1", "v1beta1"


def make_definition(*, stored: str, served: tuple[str, ...]) -> dict[str, Any]:
    """The CRD of a step: which version is stored, and which are served."""
    definition = yaml.safe_load((ROOT / "crds" / "servingclusters.yaml").read_text())
    definition["metadata"]["name"] = PLURAL
    definition["spec"]["group"] = GROUP
    definition["spec"]["names"] |= {"shortNames": [], "categories": []}
    definition["spec"]["conversion"] = {"strategy": "None"}
    (old,) = definition["spec"]["versions"]
    new = copy.deepcopy(old) | {"name": NEW}
    spec = new["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for field in (spec["autotune"]["properties"]["mode"], spec["parameters"]["properties"]["earlyRejection"]):
        field["enum"].remove("Off")
    for version in (old, new):
        version |= {"storage": version["name"] == stored, "served": version["name"] in served}
    definition["spec"]["versions"] = [old, new]
    return definition


class Versions:
    """ServingClusters of the copied group, by version."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client, self.namespace = client, namespace

    def move(self, *, stored: str, served: tuple[str, ...]) -> None:
        definition = make_definition(stored=stored, served=served)
        self.client.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(definition))
        self.client.wait_established(PLURAL)

    def write(self, name: str, version: str, **spec: Any) -> None:
        manifest = make_manifest(spec, {"name": name, "namespace": self.namespace})
        manifest["apiVersion"] = f"{GROUP}/{version}"
        self.client.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def read(self, name: str, version: str) -> dict[str, Any]:
        kind = f"servingclusters.{version}.{GROUP}"
        found: dict[str, Any] = json.loads(self.client.kubectl("get", kind, name, "-n", self.namespace, "-o", "json"))
        return found

    def patch(self, name: str, version: str, spec: dict[str, Any]) -> None:
        kind = f"servingclusters.{version}.{GROUP}"
        change = json.dumps({"spec": spec})
        self.client.kubectl("patch", kind, name, "-n", self.namespace, "--type=merge", "-p", change)

    def list_stored(self) -> list[str]:
        found: list[str] = json.loads(self.client.kubectl("get", "crd", PLURAL, "-o", "json"))["status"][
            "storedVersions"
        ]
        return found


@pytest.fixture
def versions(client: Client, namespace: str) -> Iterator[Versions]:
    made = Versions(client, namespace)
    yield made
    client.kubectl("delete", "crd", PLURAL, "--ignore-not-found", "--timeout=60s")


def test_objects_survive_every_step_to_the_next_version_and_off_goes(versions: Versions) -> None:
    # Release 1: both are served, and say the same.
    versions.move(stored=OLD, served=(OLD, NEW))
    versions.write("old", OLD, autotune={"mode": "Off"}, replicas=3)
    versions.write("new", NEW, autotune={"mode": "Disabled"})
    assert versions.read("old", NEW)["spec"] == versions.read("old", OLD)["spec"]
    assert versions.read("new", OLD)["spec"]["autotune"]["mode"] == "Disabled"
    with pytest.raises(TestbedError, match="Unsupported value"):
        versions.write("refused", NEW, autotune={"mode": "Off"})
    # Release 2: the new one is stored. An Off that is there stays readable, and edits of other fields are accepted.
    versions.move(stored=NEW, served=(OLD, NEW))
    assert versions.list_stored() == [OLD, NEW]
    versions.patch("old", NEW, {"replicas": 4})
    assert versions.read("old", OLD)["spec"]["autotune"]["mode"] == "Off"
    versions.patch("old", NEW, {"autotune": {"mode": "Disabled"}})
    with pytest.raises(TestbedError, match="Unsupported value"):
        versions.patch("old", NEW, {"autotune": {"mode": "Off"}})
    # Release 3: every object was written once more, so that the old version can go.
    versions.patch("new", NEW, {"replicas": 4})
    change = json.dumps({"status": {"storedVersions": [NEW]}})
    versions.client.kubectl("patch", "crd", PLURAL, "--subresource=status", "--type=merge", "-p", change)
    before = versions.read("old", NEW)
    versions.move(stored=NEW, served=(NEW,))
    assert versions.list_stored() == [NEW]
    assert versions.read("old", NEW)["spec"] == before["spec"]
    assert (before["metadata"]["generation"], before["spec"]["replicas"]) == (3, 4)
