"""The informer: kopf lists, watches, reconnects and re-authenticates; its events only enqueue keys.

kopf's own handlers are not used: they write finalizers and annotations, and retry at a fixed pace. A gap in a watch
delays a reconcile until the next event or resync, and loses nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kopf

from sluice_operator.api.labels import CLUSTER_LABEL, MANAGED_BY_LABEL
from sluice_operator.api.names import MANAGER, ClusterKey
from sluice_operator.kubernetes.kinds import CLUSTERS, NODES
from sluice_operator.kubernetes.rbac import WATCHED

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

# The API server sends a bookmark every minute.
INACTIVITY_S = 70.0
RECONNECT_S = 0.1
# kopf keeps a task for each object that had an event, for so long.
IDLE_S = 1.0


@dataclass(slots=True, kw_only=True)
class Informer:
    """Feeds keys from watches.

    Args:
        handle_event: Called with the key of the cluster that an event is about, and the object.
        handle_node: Called with a node and the kind of the event; None: nodes are not watched.
        now: Monotonic seconds.
        last_event_s: When the last event came, on that clock.
    """

    handle_event: Callable[[ClusterKey, Mapping[str, Any]], None]
    now: Callable[[], float]
    handle_node: Callable[[Mapping[str, Any], str | None], None] | None = None
    last_event_s: float = 0.0

    async def run(self, namespaces: Sequence[str], is_ready: asyncio.Event) -> None:
        """Watches until the process is stopped.

        Args:
            namespaces: Where; everywhere when empty.
            is_ready: Set once the watches have begun.
        """
        await kopf.operator(
            registry=self._make_registry(),
            settings=make_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=tuple(namespaces),
            ready_flag=is_ready,
        )

    def take(self, body: Mapping[str, Any], kind: str | None = None) -> None:
        """Handles one event.

        Args:
            body: The object.
            kind: ADDED, MODIFIED or DELETED; None where it was listed.
        """
        self.last_event_s = self.now()
        if body.get("kind") == NODES.name:
            assert self.handle_node is not None, "nodes are not watched"
            self.handle_node(body, kind)
            return
        key = find_key(body)
        if key is not None:
            self.handle_event(key, body)

    def _make_registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        # kopf swallows what handlers raise; this one only reads two fields. It is a coroutine because kopf calls plain
        # functions in threads, and the queue belongs to the event loop.
        async def on_event(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's name
            self.take(body, type)

        def login(**arguments: Any) -> kopf.ConnectionInfo | None:
            return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

        kopf.on.login(registry=registry)(login)
        for kind in (*WATCHED, NODES) if self.handle_node else WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"enqueue-{kind.plural}")(
                on_event
            )
        return registry


def make_settings() -> kopf.OperatorSettings:
    """Makes kopf's settings: no events of its own, no scanning, only objects of ours."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    # Events that are dropped at shutdown do no harm: the next process reconciles everything.
    settings.queueing.idle_timeout = IDLE_S
    settings.queueing.exit_timeout = 0.1
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.reconnect_backoff = RECONNECT_S
    for kind in WATCHED:
        if kind is not CLUSTERS:
            # Otherwise kopf would watch every pod there is.
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = f"{MANAGED_BY_LABEL}={MANAGER}"
    return settings


def find_key(body: Mapping[str, Any]) -> ClusterKey | None:
    """Finds the cluster that an object belongs to, or is."""
    metadata = body.get("metadata", {})
    is_cluster = body.get("kind") == CLUSTERS.name
    name = metadata.get("name") if is_cluster else (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return ClusterKey(metadata["namespace"], name) if name else None
