"""Brings children to what they should be, and never touches what belongs to somebody else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sluice_operator.api.conditions import Reason
from sluice_operator.kubernetes.interface import (
    BUDGETS,
    CERTIFICATES,
    CLUSTERS,
    ConflictError,
    ForbiddenError,
    InvalidError,
    kind_of,
    name_of,
    uid_of,
)
from sluice_operator.resources.desired import adopt, find_owner, guard, is_in_force, key_of
from sluice_operator.resources.pod_status import Trouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Mapping

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.interface import Kubernetes, Object
    from sluice_operator.resources.desired import ChildKey

logger = logging.getLogger(__name__)

# Kinds of which a cluster does not always have one.
OPTIONAL_KINDS = frozenset({BUDGETS.name, CERTIFICATES.name})


class Children:
    """The children of one cluster during one look.

    Args:
        kubernetes: The API server.
        cluster: The manifest, with namespace and uid.
        live: Objects with its labels, by kind and name.

    Attributes:
        troubles: What could not be done, and is not cured by trying at once again.
    """

    def __init__(self, kubernetes: Kubernetes, cluster: ServingCluster, live: Mapping[ChildKey, Object]) -> None:
        self.kubernetes = kubernetes
        self.troubles: list[Trouble] = []
        self._cluster = cluster
        self._live = live

    @property
    def cluster_name(self) -> str:
        """Name of the cluster."""
        return self._cluster.metadata.name

    async def ensure(self, child: Object) -> None:
        """Applies a child unless it is so already.

        Raises:
            KubernetesError: To be tried again.
        """
        live = self._live.get(key_of(child))
        if live is not None and self.is_ours(live) and is_in_force(child, live):
            return
        live = live or await self.find(child)
        if self.may_write(child, live):
            await self.attempt(self.kubernetes.apply(guard(child, live)), f"{child['kind']} {name_of(child)}")

    async def find(self, child: Object) -> Object | None:
        """Looks for an object of the same name that does not carry our labels."""
        return await self.kubernetes.get(kind_of(child), self._cluster.metadata.namespace, name_of(child))

    def adopt(self, child: Object) -> Object:
        """Completes a child that is not rendered with the others."""
        return adopt(child, self._cluster)

    def is_ours(self, live: Object) -> bool:
        """Whether an object belongs to this very cluster."""
        owner = find_owner(live)
        return owner is not None and owner["uid"] == self._cluster.metadata.uid

    def may_write(self, child: Object, live: Object | None) -> bool:
        """Whether the name is free or ours.

        Raises:
            ConflictError: It belongs to a deleted cluster of the same name, whose children are on their way out.
        """
        if live is None or self.is_ours(live):
            return True
        owner = find_owner(live)
        what = f"{child['kind']} {name_of(child)}"
        if owner and (owner["kind"], owner["name"]) == (CLUSTERS.name, self._cluster.metadata.name):
            raise ConflictError(f"{what} of the deleted cluster of this name is not gone yet")
        message = f"{what} exists and is not this cluster's; rename or delete it, or rename the cluster"
        self.troubles.append(Trouble(reason=Reason.NAME_CONFLICT, message=message))
        return False

    async def attempt(self, write: Awaitable[Any], what: str) -> bool:
        """Awaits a write; one that is refused becomes a trouble, so that the rest goes on.

        Raises:
            KubernetesError: To be tried again.
        """
        try:
            await write
        except (ForbiddenError, InvalidError) as error:
            # What the server does not accept was rendered from the user's own pod template.
            is_template = isinstance(error, InvalidError) and what.startswith("Deployment")
            reason = Reason.POD_TEMPLATE_REFUSED if is_template else Reason.FORBIDDEN
            if "exceeded quota" in str(error):
                reason = Reason.QUOTA_EXCEEDED
            self.troubles.append(Trouble(reason=reason, message=f"{what}: {error}"))
            logger.warning("%s: %s", what, error)
            return False
        return True

    async def remove_obsolete(self, wanted: Collection[ChildKey]) -> None:
        """Deletes children that are no longer wanted, such as the disruption budget of a single pod.

        Raises:
            KubernetesError: To be tried again.
        """
        for key, live in self._live.items():
            if key[0] in OPTIONAL_KINDS and key not in wanted and self.is_ours(live):
                kind, namespace = kind_of(live), self._cluster.metadata.namespace
                delete = self.kubernetes.delete(kind, namespace, name_of(live), uid_of(live))
                await self.attempt(delete, f"{key[0]} {key[1]}")
