"""Talks to a test cluster: with kubectl as a user would, and over HTTPS where details of the answer matter."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.errors import TestbedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from testbed.settings import Settings


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the API server.

    Args:
        status: HTTP status.
        content: The object, or the Status that explains a refusal.
    """

    status: int
    content: dict[str, Any]

    @property
    def is_ok(self) -> bool:
        """Whether the request was carried out."""
        return self.status < 300


class Client:
    """One user of the cluster.

    Args:
        settings: The cluster.
        path: Folder of kubectl.
        user: User whose certificate and kubeconfig are used.
    """

    def __init__(self, settings: Settings, path: Path, user: str = "admin") -> None:
        self.kubeconfig = settings.kubeconfig(user)
        self._url = settings.api_url
        self._path = path
        self._tls = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
        self._tls.load_cert_chain(settings.pki / f"{user}.crt", settings.pki / f"{user}.key")

    def request(self, method: str, path: str, content: Any = None, media: str = "application/json") -> Answer:
        """Sends one request.

        Args:
            method: HTTP method.
            path: Path and query.
            content: Sent as JSON.
            media: Type of ``content``, such as ``application/apply-patch+yaml``.

        Raises:
            OSError: The API server cannot be reached, or ended in the middle of its answer.
        """
        body = None if content is None else json.dumps(content).encode()
        return send(
            urllib.request.Request(f"{self._url}{path}", body, {"Content-Type": media}, method=method), self._tls
        )

    def read_changes(self, collection: str, since: str) -> list[dict[str, Any]]:
        """Reads how the objects of a collection changed, oldest change first, as a watch reports it.

        The API server keeps changes for some minutes.

        Args:
            collection: Path of the collection.
            since: Resource version of the collection or of one of its objects.

        Raises:
            TestbedError: The API server does not keep changes that old any more.
        """
        query = f"watch=true&resourceVersion={since}&timeoutSeconds=2"
        with urllib.request.urlopen(f"{self._url}{collection}?{query}", context=self._tls, timeout=30) as answer:
            events = [json.loads(line) for line in answer]
        if any(event["type"] == "ERROR" for event in events):
            raise TestbedError(f"{collection} since {since}: {events[-1]['object']}")
        return [event["object"] for event in events]

    def is_ready(self) -> bool:
        """Whether the API server reports that it is ready."""
        try:
            return self.request("GET", "/readyz").is_ok
        except OSError:
            return False

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs kubectl and returns what it prints.

        Raises:
            TestbedError: kubectl failed; the message is its output.
        """
        return self._run("kubectl", *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Runs helm without the user's own configuration, and returns what it prints.

        Raises:
            TestbedError: helm failed; the message is its output.
        """
        return self._run("helm", *arguments)

    def _run(self, program: str, *arguments: str, stdin: str | None = None) -> str:
        homes = {f"HELM_{kind}_HOME": str(self.kubeconfig.parent / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [self._path / program, *arguments],
            input=stdin,
            env={**os.environ, **homes, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise TestbedError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def wait_established(self, *definitions: str, patience_s: float = 30.0) -> None:
        """Waits until the API server serves the kinds of CRDs.

        ``kubectl wait`` fails on a CRD so young that its conditions are null.

        Raises:
            TestbedError: A kind is not served after ``patience_s``.
        """
        deadline = time.monotonic() + patience_s
        for name in definitions:
            while not _is_established(json.loads(self.kubectl("get", "crd", name, "-o", "json"))):
                if time.monotonic() > deadline:
                    raise TestbedError(f"crd {name} is not served after {patience_s:.0f} s")
                time.sleep(0.2)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Applies objects."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def render_outside_service(
    name: str, namespace: str, address: str, ports: Mapping[str, tuple[int, int]]
) -> list[dict[str, Any]]:
    """Renders a Service of a program that runs on this machine, outside the cluster.

    Args:
        name: Name of the Service.
        namespace: Its namespace.
        address: Of this machine, as pods reach it.
        ports: By name, the port of the Service and that of the program.
    """
    metadata = {"name": name, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "ports": [
                    {"name": key, "port": port, "protocol": "TCP", "targetPort": target}
                    for key, (port, target) in ports.items()
                ]
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": key, "port": target, "protocol": "TCP"} for key, (_, target) in ports.items()],
        },
    ]


def send(request: urllib.request.Request, tls: ssl.SSLContext | None = None) -> Answer:
    """Sends one request over HTTP, and reads the whole answer.

    Raises:
        OSError: The server cannot be reached, or ended in the middle of its answer.
    """
    try:
        # Without proxies: urllib would look for them in the environment, which pytest changes meanwhile.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        with opener.open(request, timeout=30) as answer:
            return Answer(answer.status, _read_json(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _read_json(error.read()))
    except http.client.HTTPException as error:  # not an OSError, though the connection is what failed
        raise ConnectionError(f"{request.full_url}: the answer broke off: {error!r}") from error


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except json.JSONDecodeError:
        return {"message": body.decode(errors="replace")}
    return content if isinstance(content, dict) else {"content": content}


def _is_established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(item["type"] == "Established" and item["status"] == "True" for item in conditions)
