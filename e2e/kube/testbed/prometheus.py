"""Prometheus and its checker promtool: those on PATH, or those of Debian's package ``prometheus``.

The package is fetched and unpacked, not installed, because an installed one starts a Prometheus. The programs are kept
in ``~/.cache/sluice/prometheus``. Building them from their Go module would take minutes, since it includes the clients
of three clouds.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.client import render_outside_service
from testbed.errors import MissingError, TestbedError
from testbed.settings import find_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from testbed.cluster import Testbed
    from testbed.settings import Settings

PACKAGE = "prometheus"
# Where docs/guides/autoscaling.md expects it.
NAMESPACE = "monitoring"
PORT = 9090
# The default of a minute is one of patience.
SCRAPE_INTERVAL = "2s"


def find_program(name: str) -> Path:
    """Finds ``prometheus`` or ``promtool``, and fetches it if need be.

    Raises:
        MissingError: This machine has neither the program nor apt.
        TestbedError: The package cannot be fetched.
    """
    found = shutil.which(name)
    if found:
        return Path(found)
    cached = find_cache("prometheus") / name
    if not cached.is_file():
        if shutil.which("apt-get") is None:
            raise MissingError(f"neither {name} nor apt-get is on PATH; install Prometheus")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            (_unpack(Path(folder)) / name).rename(cached)
    return cached


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs promtool; returns its exit status and its output.

    Raises:
        MissingError: This machine has neither promtool nor apt.
        TestbedError: The package cannot be fetched.
    """
    return subprocess.run([find_program("promtool"), *arguments], capture_output=True, text=True, check=False)


def read_version() -> str:
    """Reads Prometheus' version."""
    done = subprocess.run([find_program("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[2]


@contextlib.contextmanager
def run_prometheus(testbed: Testbed, monitors: Sequence[dict[str, Any]], namespace: str) -> Iterator[str]:
    """Runs Prometheus on this machine, behind the Service ``prometheus`` of its namespace.

    Args:
        testbed: The cluster.
        monitors: ServiceMonitors that say what it scrapes.
        namespace: Theirs.

    Yields:
        Its URL in the cluster.
    """
    settings = testbed.settings
    # The port after those of the cluster.
    port = settings.ports.dns + 1
    file = settings.folder / "prometheus.json"
    file.write_text(json.dumps(render_configuration(settings, monitors, namespace)))
    testbed.client.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        *render_outside_service(PACKAGE, NAMESPACE, settings.address, {"web": (PORT, port)}),
    )
    command = [
        str(find_program("prometheus")),
        f"--config.file={file}",
        f"--storage.tsdb.path={settings.folder / 'prometheus'}",
        f"--web.listen-address={settings.address}:{port}",
    ]
    testbed.processes.start("prometheus", command)
    try:
        yield f"http://{PACKAGE}.{NAMESPACE}:{PORT}"
    finally:
        testbed.processes.stop("prometheus")


def render_configuration(settings: Settings, monitors: Sequence[dict[str, Any]], namespace: str) -> dict[str, Any]:
    """Renders Prometheus' configuration, with the labels that the Prometheus operator sets for a ServiceMonitor."""
    discovery = {
        "role": "endpointslice",
        "kubeconfig_file": str(settings.kubeconfig()),
        "namespaces": {"names": [namespace]},
    }
    jobs = [
        {
            "job_name": f"{monitor['metadata']['name']}/{number}",
            "kubernetes_sd_configs": [discovery],
            "relabel_configs": _render_relabelings(monitor["spec"]["selector"]["matchLabels"], endpoint["port"]),
        }
        for monitor in monitors
        for number, endpoint in enumerate(monitor["spec"]["endpoints"])
    ]
    return {"global": {"scrape_interval": SCRAPE_INTERVAL}, "scrape_configs": jobs}


def _render_relabelings(labels: dict[str, str], port: str) -> list[dict[str, Any]]:
    kept = {f"service_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value for name, value in labels.items()}
    kept["endpointslice_port_name"] = port
    shown = {"namespace": "namespace", "service": "service_name", "pod": "pod_name"}
    return [
        *(
            {"action": "keep", "source_labels": [f"__meta_kubernetes_{label}"], "regex": re.escape(value)}
            for label, value in kept.items()
        ),
        *({"source_labels": [f"__meta_kubernetes_{label}"], "target_label": target} for target, label in shown.items()),
    ]


def _unpack(folder: Path) -> Path:
    # apt downloads as a user of its own, who may not write to this folder.
    download = ("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", PACKAGE)
    try:
        _run(folder, *download)
    except TestbedError:
        # A new machine has no package lists yet.
        _run(folder, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update")
        _run(folder, *download)
    (package,) = folder.glob(f"{PACKAGE}_*.deb")
    _run(folder, "dpkg-deb", "--extract", package.name, "tree")
    return folder / "tree" / "usr" / "bin"


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
