"""Owner references: by them Kubernetes deletes what a cluster owns, and foreign objects are left alone."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.labels import APPLIED_HASH_ANNOTATION
from sluice_operator.kubernetes.errors import ConflictError
from sluice_operator.kubernetes.kinds import CLUSTERS
from sluice_operator.kubernetes.objects import annotations_of, name_of

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def set_controller_reference(child: Object, cluster: ServingCluster) -> Object:
    """Sets namespace, controller reference, and the hash of what is applied."""
    metadata = cluster.metadata
    text = json.dumps(child, sort_keys=True)
    owned = {
        **child["metadata"],
        "namespace": metadata.namespace,
        "ownerReferences": [
            {
                "apiVersion": cluster.api_version,
                "kind": cluster.kind,
                "name": metadata.name,
                "uid": metadata.uid,
                "controller": True,
            }
        ],
        # Comparing desired fields cannot notice a field that is no longer desired; this hash does.
        "annotations": {
            **annotations_of(child),
            APPLIED_HASH_ANNOTATION: hashlib.sha256(text.encode()).hexdigest()[:16],
        },
    }
    return {**child, "metadata": owned}


def get_controller(child: Object) -> Object | None:
    """The controller of an object, as its owner reference; None when nobody controls it."""
    references = child["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def is_owned(live: Object, uid: str) -> bool:
    """Whether an object belongs to the very cluster of this uid."""
    owner = get_controller(live)
    return owner is not None and owner["uid"] == uid


def describe_conflict(live: Object, cluster: ServingCluster) -> Failure:
    """Says that an object with a child's name belongs to somebody else, and what to do.

    Raises:
        ConflictError: It belongs to a deleted cluster of the same name, whose children are on their way out.
    """
    owner = get_controller(live)
    what = f"{live['kind']} {name_of(live)}"
    if owner and (owner["kind"], owner["name"]) == (CLUSTERS.name, cluster.metadata.name):
        raise ConflictError(f"{what} of the deleted cluster of this name is not gone yet")
    message = f"{what} exists and is not this cluster's; rename or delete it, or rename the cluster"
    return Failure(reason=Reason.NAME_CONFLICT, message=message)
