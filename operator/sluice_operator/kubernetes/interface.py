"""The verbs of the API server that the operator uses, on plain dicts, and the errors that they raise.

Typed models of the client would drop fields that they do not know on the way back to the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of object.

    Args:
        api_version: Group and version, such as ``apps/v1``.
        name: Kind, such as ``Deployment``.
        plural: Name in addresses, such as ``deployments``.
    """

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """Group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version within the group."""
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        """Address of the group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"


CLUSTERS = Kind(api_version="sluice.dev/v1alpha1", name="ServingCluster", plural="servingclusters")
DEPLOYMENTS = Kind(api_version="apps/v1", name="Deployment", plural="deployments")
PODS = Kind(api_version="v1", name="Pod", plural="pods")
SERVICES = Kind(api_version="v1", name="Service", plural="services")
CONFIG_MAPS = Kind(api_version="v1", name="ConfigMap", plural="configmaps")
SERVICE_ACCOUNTS = Kind(api_version="v1", name="ServiceAccount", plural="serviceaccounts")
DISRUPTION_BUDGETS = Kind(api_version="policy/v1", name="PodDisruptionBudget", plural="poddisruptionbudgets")
NETWORK_POLICIES = Kind(api_version="networking.k8s.io/v1", name="NetworkPolicy", plural="networkpolicies")
SERVICE_MONITORS = Kind(api_version="monitoring.coreos.com/v1", name="ServiceMonitor", plural="servicemonitors")
CERTIFICATES = Kind(api_version="cert-manager.io/v1", name="Certificate", plural="certificates")
LEASES = Kind(api_version="coordination.k8s.io/v1", name="Lease", plural="leases")
NODES = Kind(api_version="v1", name="Node", plural="nodes")
EVENTS = Kind(api_version="events.k8s.io/v1", name="Event", plural="events")

KINDS = {
    kind.name: kind
    for kind in (
        CLUSTERS,
        DEPLOYMENTS,
        PODS,
        SERVICES,
        CONFIG_MAPS,
        SERVICE_ACCOUNTS,
        DISRUPTION_BUDGETS,
        NETWORK_POLICIES,
        SERVICE_MONITORS,
        CERTIFICATES,
        LEASES,
        EVENTS,
    )
}


class KubernetesError(Exception):
    """A request that failed.

    Below it:

    - ``NotFoundError`` (404)
    - ``ConflictError`` (409): somebody else wrote first, or the object was replaced
    - ``ForbiddenError`` (401, 403): RBAC, a quota, a namespace that ends
    - ``InvalidError`` (400, 422, and other 4xx): what was sent is wrong
    - ``BusyError`` (429, 5xx, no answer): try again later
    - ``LeaseLostError``: this replica no longer leads, nothing was sent
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFoundError(KubernetesError):
    """There is no such object."""


class ConflictError(KubernetesError):
    """The object exists already, or its uid or resourceVersion is another one."""


class ForbiddenError(KubernetesError):
    """We may not do this."""


class InvalidError(KubernetesError):
    """The server refuses what was sent."""


class BusyError(KubernetesError):
    """The server did not answer, or asks to come back later."""


class LeaseLostError(KubernetesError):
    """This replica no longer holds the lease; nothing was sent."""


# From status to error; what is not here is invalid below 500 and busy from there on.
ERRORS: dict[int, type[KubernetesError]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: BusyError,
}


# Server-side apply answers unknown fields and values of a wrong type with status 500 and these words.
NOT_TYPED = "failed to create typed patch object"


def make_error(status: int, message: str, retry_after_s: float | None = None) -> KubernetesError:
    """Makes the error of an HTTP status, or of the server's message where the status misleads."""
    default = InvalidError if status < 500 or NOT_TYPED in message else BusyError
    return ERRORS.get(status, default)(message, retry_after_s=retry_after_s)


class Kubernetes(Protocol):
    """The verbs. Each raises a ``KubernetesError`` when it fails; none retries."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Reads an object; None when there is none."""

    async def list(self, kind: Kind, namespace: str, labels: dict[str, str]) -> list[Object]:
        """Reads the objects with these labels, as of now."""

    async def is_served(self, kind: Kind) -> bool:
        """Whether the server has this kind at all."""

    async def apply(self, content: Object) -> Object:
        """Applies an object server-side as ours, by force; with a uid in it, to that very object only."""

    async def create(self, content: Object) -> Object:
        """Creates an object; ``ConflictError`` when there is one."""

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """Merges a patch; with a resourceVersion or uid in it, into that very object only."""

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        """Merges a patch into the status."""

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes an object if it still has this uid; one that is gone is no error."""


def kind_of(content: Object) -> Kind:
    """The kind of an object."""
    return KINDS[content["kind"]]


def name_of(content: Object) -> str:
    """The name of an object."""
    name: str = content["metadata"]["name"]
    return name


def uid_of(content: Object) -> str:
    """The uid of an object; empty before it exists."""
    uid: str = content["metadata"].get("uid", "")
    return uid


def annotations_of(content: Object) -> dict[str, str]:
    """The annotations of an object."""
    return content["metadata"].get("annotations") or {}


def labels_of(content: Object) -> dict[str, str]:
    """The labels of an object."""
    return content["metadata"].get("labels") or {}
