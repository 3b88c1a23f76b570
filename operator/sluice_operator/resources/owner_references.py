"""Owner references: by them Kubernetes deletes what a cluster owns, and we know whose an object is."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING

from sluice_operator.api.labels import APPLIED_HASH_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


def set_controller_reference(child: Object, cluster: ServingCluster) -> Object:
    """Sets namespace, controller reference, and the hash of what is applied."""
    metadata = cluster.metadata
    text = json.dumps(child, sort_keys=True)
    owned = copy.deepcopy(child)
    owned["metadata"] |= {
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
    return owned


def get_controller(child: Object) -> Object | None:
    """The controller of an object, as its owner reference; None when nobody controls it."""
    references = child["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)
