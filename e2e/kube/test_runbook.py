"""The commands that README and the guides mark ``sh ci-kube`` run as shown, on a real API server."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml
from testbed.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.client import Client
    from testbed.cluster import Testbed

FENCE = re.compile(r"^( *)```sh ci-kube\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
README = "".join(block for _, block in FENCE.findall((ROOT / "README.md").read_text()))
BLOCKS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for number, (_, block) in enumerate(FENCE.findall(page.read_text()))
]


def test_pages_show_commands() -> None:
    assert len(BLOCKS) >= 3
    assert "helm install" in README


def run(testbed: Testbed, client: Client, commands: str, **variables: str) -> str:
    """Runs commands as the administrator, in the root of the checkout."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(client.kubeconfig),
        "PATH": f"{testbed.path}:{os.environ['PATH']}",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_shown_command_works(testbed: Testbed, client: Client, namespace: str, block: str) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    client.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))
    name = manifest["metadata"]["name"]
    run(testbed, client, block, NAMESPACE=namespace, NAME=name, OPERATOR=namespace)


@pytest.fixture
def bare_cluster(client: Client, crd: Path) -> Iterator[None]:
    """A cluster without Sluice's CRD; afterwards the CRD is as other tests need it."""
    definition = ("crd", "servingclusters.sluice.dev", "--ignore-not-found", "--timeout=60s")
    client.kubectl("delete", *definition)
    yield
    client.helm("uninstall", "sluice", "-n", "llm", "--ignore-not-found")
    client.kubectl("delete", "namespace", "llm", "--wait=false")
    client.kubectl("delete", *definition)
    client.kubectl("apply", "--server-side", "-f", str(crd))
    client.wait_established("servingclusters.sluice.dev")


@pytest.mark.usefixtures("bare_cluster")
def test_the_readme_commands_install_and_edit_a_cluster(testbed: Testbed, client: Client) -> None:
    said = run(testbed, client, README)
    assert "servingcluster.sluice.dev/qwen created" in said
    spec = json.loads(client.kubectl("get", "-n", "llm", "slc", "qwen", "-o", "json"))["spec"]
    assert (spec["replicas"], spec["slo"]["tpotMilliseconds"], spec["strategy"]) == (6, 60, "Sluice")
    assert "deployment.apps/sluice-operator" in client.kubectl("get", "deployments", "-n", "llm", "-o", "name")
