"""The commands of the pages for operators (``sh ci-kube``) run as they are shown, on a real API server."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml
from testbed.settings import ROOT

if TYPE_CHECKING:
    from testbed.bed import Testbed
    from testbed.client import Client

FENCE = re.compile(r"^( *)```sh ci-kube\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, (_, block) in enumerate(FENCE.findall(page.read_text()))
]


def test_pages_show_commands() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("block", BLOCKS)
def test_a_shown_command_works(testbed: Testbed, client: Client, namespace: str, block: str) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    client.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))
    environment = {
        **os.environ,
        "KUBECONFIG": str(client.kubeconfig),
        "PATH": f"{testbed.path}:{os.environ['PATH']}",
        "NAMESPACE": namespace,
        "NAME": manifest["metadata"]["name"],
        "OPERATOR": namespace,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
