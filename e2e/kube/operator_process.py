"""The operator as processes of this machine, with exactly the rights of ``kubernetes/rbac.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

import yaml

from sluice_operator.kubernetes.rbac import LEASE_RULES, NODE_RULES, RULES

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.client import Client
    from testbed.cluster import Testbed

SYSTEM = "sluice-system"
RBAC = "rbac.authorization.k8s.io"
FIRST_PORT = 17460


class Operator:
    """One replica."""

    def __init__(self, kubeconfig: Path, port: int, log: Path, **options: str) -> None:
        self.port, self.log = port, log
        self.options = {"namespace": SYSTEM, "host": "127.0.0.1", "port": str(port), **options}
        self._kubeconfig = kubeconfig
        self._is_over = False
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "sluice_operator", *self._arguments()],
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
                stdout=file,
                stderr=file,
            )

    def restart_if_ended(self) -> bool:
        """Starts the process again if it has exited by itself, as Kubernetes would; returns whether it had."""
        has_ended = not self._is_over and self.process.poll() is not None
        if has_ended:
            self.process = self._start()
        return has_ended

    def _arguments(self) -> list[str]:
        return [part for name, value in self.options.items() for part in (f"--{name.replace('_', '-')}", value)]

    def read(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    @property
    def leads(self) -> bool:
        return "sluice_operator_is_leader 1.0" in self.read("/metrics") and self.read("/readyz") == "ok\n"

    def calls(self) -> dict[tuple[str, str, str], float]:
        """Counts requests by verb, resource and status, without those for the lease and for discovery."""
        found = {}
        for line in self.read("/metrics").splitlines():
            if line.startswith("sluice_operator_api_calls_total{"):
                labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
                verb, resource, status = (labels[name].strip('"') for name in ("verb", "resource", "status"))
                if resource != "leases" and verb != "discover":
                    found[verb, resource, status] = float(line.split()[-1])
        return found

    def writes(self) -> dict[tuple[str, str, str], float]:
        return {call: count for call, count in self.calls().items() if call[0] not in ("get", "list")}

    def end(self, number: int) -> int:
        self._is_over = True
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


def make_rules(rules: dict[Any, tuple[str, ...]]) -> list[dict[str, Any]]:
    return [
        {
            "apiGroups": [kind.group],
            "resources": [f"{kind.plural}/{part}" if part else kind.plural],
            "verbs": list(verbs),
        }
        for (kind, part), verbs in rules.items()
    ]


def bind(
    kind: str, name: str, namespace: str, rules: dict[Any, tuple[str, ...]], account: str = ""
) -> list[dict[str, Any]]:
    """Describes a Role or ClusterRole of the operator's service account, and its binding."""
    metadata = {"name": name, **({"namespace": namespace} if kind == "Role" else {})}
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, "rules": make_rules(rules)},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account or name, "namespace": SYSTEM}],
        },
    ]


def make_access(client: Client, testbed: Testbed, name: str, namespace: str = "") -> Path:
    """Makes a service account with exactly the rights of ``rbac.py``, in all or one namespace; returns a kubeconfig."""
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    client.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SYSTEM}},
        *bind("Role", name, SYSTEM, LEASE_RULES),
        *bind("Role" if namespace else "ClusterRole", name, namespace, RULES),
        *([] if namespace else bind("ClusterRole", f"{name}-nodes", "", NODE_RULES, account=name)),
    )
    content = yaml.safe_load(client.kubeconfig.read_text())
    token = client.kubectl("create", "token", "-n", SYSTEM, name, "--duration=2h").strip()
    for user in content["users"]:
        user["user"] = {"token": token}
    path = testbed.settings.folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


class Replicas:
    """Replicas of the operator, with ports and logs of their own.

    Args:
        client: The administrator.
        testbed: The cluster.
    """

    def __init__(self, client: Client, testbed: Testbed) -> None:
        self._started: list[Operator] = []
        self._everywhere = make_access(client, testbed, "operator")
        self._logs = testbed.settings.logs

    def start(self, identity: str, kubeconfig: Path | None = None, **options: str) -> Operator:
        port, log = FIRST_PORT + len(self._started), self._logs / f"operator-{identity}.log"
        started = Operator(kubeconfig or self._everywhere, port, log, identity=identity, **options)
        self._started.append(started)
        return started

    def restart_ended(self) -> None:
        """Starts each replica again that has exited by itself, as Kubernetes would."""
        for operator in self._started:
            operator.restart_if_ended()

    def end(self) -> None:
        for operator in self._started:
            operator.end(signal.SIGKILL)
