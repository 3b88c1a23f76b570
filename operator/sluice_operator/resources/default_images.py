"""The images of clusters that name none: each keeps the one it was accepted with until its upgrade is allowed.

The image is kept on the Deployment that runs it, so that no memory of the operator decides what a cluster runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice_operator.api import names
from sluice_operator.api.labels import DEFAULT_IMAGE_ANNOTATION
from sluice_operator.kubernetes.objects import annotations_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.kubernetes.objects import Object


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultImages:
    """Images of a cluster's engines and routers, where its spec names none.

    Args:
        engine: Image of engines.
        router: Image of routers.
    """

    engine: str
    router: str


def keep_default_images(
    cluster: ServingCluster, deployments: Mapping[str, Object | None], newest: DefaultImages
) -> DefaultImages:
    """Finds the default images that a cluster runs.

    Args:
        cluster: The manifest.
        deployments: Its Deployments as they are, by component.
        newest: Images that the operator was installed with.

    Returns:
        The images that it runs; the newest where it runs none, or one that its spec names or named.
    """
    spec = cluster.spec
    engine = None if spec.engine.image else _read_kept(deployments.get(names.ENGINE), names.ENGINE)
    router = None if spec.router.image else _read_kept(deployments.get(names.ROUTER), names.ROUTER)
    return DefaultImages(engine=engine or newest.engine, router=router or newest.router)


def _read_kept(deployment: Object | None, component: str) -> str | None:
    if deployment is None:
        return None
    kept = annotations_of(deployment).get(DEFAULT_IMAGE_ANNOTATION)
    if kept is None:
        # An operator that kept no image made it.
        containers = deployment["spec"]["template"]["spec"]["containers"]
        kept = next((item.get("image") for item in containers if item.get("name") == component), None)
    return kept or None
