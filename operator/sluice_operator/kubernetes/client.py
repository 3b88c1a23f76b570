"""The API server through the official client's asyncio part, as plain dicts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import incluster_config, kube_config
from kubernetes.aio.config.config_exception import ConfigException

from sluice_operator.api.labels import format_selector
from sluice_operator.api.names import MANAGER
from sluice_operator.kubernetes.errors import BusyError, NotFoundError, make_error
from sluice_operator.kubernetes.kinds import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kubernetes.aio.client.api_client import ApiClient

    from sluice_operator.kubernetes.objects import Object

APPLY_TYPE = "application/apply-patch+yaml"
MERGE_TYPE = "application/merge-patch+json"
# Whether a kind is served changes when somebody installs its definition.
DISCOVERY_S = 300.0
# A kind that is not served may be waited for: shorter than the requeue of a cluster that waits (DEGRADED_REQUEUE_S).
ABSENCE_S = 25.0
MAX_CONNECTIONS = 64


async def load_configuration() -> Configuration:
    """Reads how to reach the API server: the pod's service account, or else the kubeconfig.

    Raises:
        kubernetes.aio.config.ConfigException: There is neither.
    """
    configuration = Configuration()
    try:
        loader = incluster_config.InClusterConfigLoader(  # type: ignore[no-untyped-call]
            token_filename=incluster_config.SERVICE_TOKEN_FILENAME,
            cert_filename=incluster_config.SERVICE_CERT_FILENAME,
        )
        loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        await kube_config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = MAX_CONNECTIONS
    return configuration


class KubernetesClient:
    """See ``Kubernetes``. Retries nothing; see ``retry``.

    Args:
        api: The client.
        timeout_s: Longest wait for an answer, in seconds.
        on_call: Called after each request with verb, plural, HTTP status (0: no answer) and duration in seconds.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        api: ApiClient,
        *,
        timeout_s: float,
        on_call: Callable[[str, str, int, float], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._on_call = on_call
        self._now = now
        self._served: dict[Kind, tuple[float, bool]] = {}

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """See ``Kubernetes.get``."""
        try:
            return await self._request("get", kind, _locate(kind, namespace, name))
        except NotFoundError:
            return None

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """See ``Kubernetes.list``."""
        query = {"labelSelector": format_selector(labels)}
        try:
            answer = await self._request("list", kind, _locate(kind, namespace), query=query)
        except NotFoundError:
            # The CRD is gone, such as cert-manager's: the next attempt must discover again.
            self._served.pop(kind, None)
            raise
        # Items of a list carry neither apiVersion nor kind.
        return [{**item, "apiVersion": kind.api_version, "kind": kind.name} for item in answer["items"]]

    async def is_served(self, kind: Kind) -> bool:
        """See ``Kubernetes.is_served``."""
        search_started_s, is_served = self._served.get(kind, (float("-inf"), False))
        if self._now() - search_started_s < (DISCOVERY_S if is_served else ABSENCE_S):
            return is_served
        try:
            answer = await self._request("discover", kind, kind.root)
            is_served = any(resource["name"] == kind.plural for resource in answer["resources"])
        except NotFoundError:
            is_served = False
        self._served[kind] = self._now(), is_served
        return is_served

    async def apply(self, content: Object) -> Object:
        """See ``Kubernetes.apply``."""
        kind, metadata = kind_of(content), content["metadata"]
        query = {"fieldManager": MANAGER, "force": "true"}
        path = _locate(kind, metadata["namespace"], metadata["name"])
        return await self._request("apply", kind, path, query=query, body=content, content_type=APPLY_TYPE)

    async def create(self, content: Object) -> Object:
        """See ``Kubernetes.create``."""
        kind = kind_of(content)
        path = _locate(kind, content["metadata"]["namespace"])
        return await self._request("create", kind, path, query={"fieldManager": MANAGER}, body=content)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch``."""
        return await self._patch("patch", kind, _locate(kind, namespace, name), patch)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """See ``Kubernetes.patch_status``."""
        return await self._patch("patch_status", kind, f"{_locate(kind, namespace, name)}/status", patch)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See ``Kubernetes.delete``."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("delete", kind, _locate(kind, namespace, name), body=body)
        except NotFoundError:
            return

    async def _patch(self, verb: str, kind: Kind, path: str, patch: Object) -> Object:
        query = {"fieldManager": MANAGER}
        return await self._request(verb, kind, path, query=query, body=patch, content_type=MERGE_TYPE)

    async def _request(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        started_s, status = self._now(), 0
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers, text = await self._send(METHODS[verb], path, query, body, content_type)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise BusyError(f"{verb} {path}: {str(error) or 'no answer'}") from error
        finally:
            self._on_call(verb, kind.plural, status, self._now() - started_s)
        if status >= 400:
            raise make_error(status, f"{verb} {path}: {_read_message(text)}", _read_retry_after(headers))
        answer: Object = json.loads(text)
        return answer

    async def _send(
        self, method: str, path: str, query: dict[str, str] | None, body: Object | None, content_type: str
    ) -> tuple[int, Any, bytes]:
        method, url, headers, content, _ = await self._api.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._api.call_api(method, url, headers, content)
        return answer.status, answer.headers, await answer.response.read()


# HTTP method of each verb of ours.
METHODS = {
    "get": "GET",
    "list": "GET",
    "discover": "GET",
    "apply": "PATCH",
    "create": "POST",
    "patch": "PATCH",
    "patch_status": "PATCH",
    "delete": "DELETE",
}


def _locate(kind: Kind, namespace: str, name: str = "") -> str:
    # Nodes have no namespace.
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{kind.root}{place}/{kind.plural}" + (f"/{name}" if name else "")


def _read_message(text: bytes) -> str:
    """The message of the server, which names the field and the limit."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")


def _read_retry_after(headers: Any) -> float | None:
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None
