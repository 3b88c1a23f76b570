"""Applies the children of a cluster, and never touches an object of another owner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.kubernetes.errors import ForbiddenError, InvalidError, exceeds_quota
from sluice_operator.kubernetes.kinds import CERTIFICATES, DISRUPTION_BUDGETS, kind_of
from sluice_operator.kubernetes.objects import name_of, uid_of
from sluice_operator.kubernetes.quantities import read_quantity
from sluice_operator.resources.children import key_of
from sluice_operator.resources.owner_references import (
    describe_conflict,
    is_owned,
    set_controller_reference,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Mapping

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object
    from sluice_operator.resources.children import ChildKey

logger = logging.getLogger(__name__)

# Kinds of which a cluster does not always have one.
OPTIONAL_KINDS = frozenset({DISRUPTION_BUDGETS.name, CERTIFICATES.name})


class ChildApplier:
    """Applies the children of one cluster during one reconcile.

    Args:
        kubernetes: The API server.
        cluster: The manifest, with namespace and uid.
        live: Objects with its labels, by kind and name.

    Attributes:
        failures: Writes that were refused, and that an immediate retry would not cure.
    """

    def __init__(self, kubernetes: Kubernetes, cluster: ServingCluster, live: Mapping[ChildKey, Object]) -> None:
        self.kubernetes = kubernetes
        self.failures: list[Failure] = []
        self._cluster = cluster
        self._live = live

    @property
    def cluster_name(self) -> str:
        """Name of the cluster."""
        return self._cluster.metadata.name

    async def apply_child(self, child: Object) -> None:
        """Applies a child unless it is up to date.

        Raises:
            KubernetesError: To be tried again.
        """
        live = self._live.get(key_of(child))
        if live is not None and self.is_owned(live) and is_applied(child, live):
            return
        live = live or await self.get_live(child)
        if self.may_write(live):
            await self.try_write(self.kubernetes.apply(require_uid(child, live)), f"{child['kind']} {name_of(child)}")

    async def get_live(self, child: Object) -> Object | None:
        """Reads the object of this name, which may lack our labels."""
        return await self.kubernetes.get(kind_of(child), self._cluster.metadata.namespace, name_of(child))

    def set_controller_reference(self, child: Object) -> Object:
        """Sets namespace and owner of a child that is not rendered with the others."""
        return set_controller_reference(child, self._cluster)

    def is_owned(self, live: Object) -> bool:
        """Whether an object belongs to this very cluster."""
        return is_owned(live, self._cluster.metadata.uid)

    def may_write(self, live: Object | None) -> bool:
        """Whether the name is free or ours.

        Raises:
            ConflictError: It belongs to a deleted cluster of the same name, whose children are on their way out.
        """
        if live is None or self.is_owned(live):
            return True
        self.failures.append(describe_conflict(live, self._cluster))
        return False

    async def try_write(self, write: Awaitable[Any], what: str) -> bool:
        """Awaits a write; a refusal becomes a failure, so that the other children are still applied.

        Raises:
            KubernetesError: To be tried again.
        """
        try:
            await write
        except (ForbiddenError, InvalidError) as error:
            # An invalid Deployment can only come from the user's podTemplate.
            is_template = isinstance(error, InvalidError) and what.startswith("Deployment")
            reason = Reason.POD_TEMPLATE_REFUSED if is_template else Reason.FORBIDDEN
            if exceeds_quota(str(error)):
                reason = Reason.QUOTA_EXCEEDED
            self.failures.append(Failure(reason=reason, message=f"{what}: {error}"))
            logger.warning("%s: %s", what, error)
            return False
        return True

    async def prune(self, wanted: Collection[ChildKey]) -> None:
        """Deletes children that are no longer wanted, such as the disruption budget of a single pod.

        Raises:
            KubernetesError: To be tried again.
        """
        for key, live in self._live.items():
            if key[0] in OPTIONAL_KINDS and key not in wanted and self.is_owned(live):
                kind, namespace = kind_of(live), self._cluster.metadata.namespace
                delete = self.kubernetes.delete(kind, namespace, name_of(live), uid_of(live))
                await self.try_write(delete, f"{key[0]} {key[1]}")


def is_applied(wanted: Any, live: Any) -> bool:
    """Whether the live object has every desired value; fields that the server or others add are ignored.

    Lists of named items are compared by name, other lists as a whole.
    """
    if isinstance(wanted, dict):
        return (live is None and not wanted) or (
            isinstance(live, dict) and all(is_applied(value, live.get(name)) for name, value in wanted.items())
        )
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return not wanted and live is None
        if wanted and all(isinstance(item, dict) and "name" in item for item in wanted):
            found = {item.get("name"): item for item in live if isinstance(item, dict)}
            return all(is_applied(item, found.get(item["name"])) for item in wanted)
        return len(wanted) == len(live) and all(is_applied(*pair) for pair in zip(wanted, live, strict=True))
    return _is_same(wanted, live)


def _is_same(wanted: object, live: object) -> bool:
    """Whether two values are equal: the server drops empty and false values, and rewrites quantities."""
    if wanted == live or (live is None and not wanted):
        return True
    if not isinstance(wanted, int | str) or not isinstance(live, int | str):
        return False
    try:
        return read_quantity(wanted) == read_quantity(live)
    except ValueError:
        return False


def require_uid(child: Object, live: Object | None) -> Object:
    """Adds the uid of the live object, so that no other one of this name is written."""
    if live is None:
        return child
    return {**child, "metadata": {**child["metadata"], "uid": uid_of(live)}}
