"""The operator's process: its tasks, and the order in which they stop.

Every replica serves probes and takes part in leader election. The leader also runs workers, resync, router connections
and the informer. When the lease is lost or a task fails, the process exits, and Kubernetes restarts it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kubernetes.aio.client.api_client import ApiClient

from sluice.certificate_rotation import CertificateFolder, keep_fresh
from sluice_operator.controller.event_filter import EventFilter
from sluice_operator.controller.informer import Informer
from sluice_operator.controller.leader_election import LeaderElector
from sluice_operator.controller.reconciler import Reconciler
from sluice_operator.controller.work_queue import WorkQueue
from sluice_operator.health import Health
from sluice_operator.kubernetes.client import KubernetesClient, load_configuration
from sluice_operator.kubernetes.errors import ForbiddenError, KubernetesError, LeaseLostError
from sluice_operator.kubernetes.fencing import LeaseFence
from sluice_operator.kubernetes.interceptors import InterceptedKubernetes
from sluice_operator.kubernetes.kinds import CLUSTERS, NODES, PODS
from sluice_operator.kubernetes.own_writes import OwnWrites
from sluice_operator.kubernetes.retry import Retry
from sluice_operator.logs import current_object
from sluice_operator.metrics import OperatorMetrics
from sluice_operator.planning.node_notices import NodeNotices
from sluice_operator.routers.connection_table import RouterConnections

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from sluice.v1 import control_pb2
    from sluice_operator.api.names import ClusterKey
    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

# Share of the resync interval that is jitter, so that clusters spread over it.
RESYNC_JITTER = 0.25
# Routers and engines acknowledge a plan within so long of each other: one reconcile sees all of them.
STATUS_DEBOUNCE_S = 0.1


class StoppedError(Exception):
    """The process is to stop."""


class Operator:
    """The program.

    Args:
        settings: Its settings.
        api: The client.

    Raises:
        CertificateError: The operator's own certificate cannot be used.
    """

    def __init__(self, settings: OperatorSettings, api: ApiClient) -> None:
        self._settings = settings
        self._certificates = CertificateFolder(Path(settings.peer_tls), is_mutual=True) if settings.peer_tls else None
        self._metrics = OperatorMetrics()
        self._kubernetes = KubernetesClient(
            api, timeout_s=settings.request_timeout_s, on_call=self._metrics.record_call, now=time.monotonic
        )
        self._elector = LeaderElector(
            self._kubernetes,
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=settings.identity,
            now=time.monotonic,
            now_text=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        )
        self._rng = random.Random()  # noqa: S311 - jitter
        self._queue: WorkQueue[ClusterKey] = WorkQueue(self._rng, time.monotonic)
        self._known_keys: set[ClusterKey] = set()
        self._own_writes = OwnWrites()
        self._event_filter = EventFilter(self._queue, self._own_writes)
        self._notices = NodeNotices()
        self._informer = Informer(handle_event=self._handle_event, now=time.monotonic)
        self._is_watching = asyncio.Event()
        self._connections: RouterConnections | None = None
        self._stop = asyncio.Event()
        self.health = Health(self._metrics, refresh=self._refresh, is_ready=self._is_ready, now=time.monotonic)

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT.

        Raises:
            ExceptionGroup: A task failed, or the lease was lost.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.health.run(self._settings.host, self._settings.port), name="health")
                group.create_task(self._wait_for_stop(), name="stop")
                group.create_task(self._elect_and_lead(), name="lead")
        except* StoppedError:
            logger.info("%s is stopping", self._settings.identity)
        finally:
            await self._elector.release()

    async def _wait_for_stop(self) -> None:
        await self._stop.wait()
        raise StoppedError

    async def _elect_and_lead(self) -> None:
        await self._wait_for_crd()
        await self._elector.acquire()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._elector.renew(), name="renew the lease")
            # The fence is innermost: no repetition outlives the lease.
            kubernetes = InterceptedKubernetes(
                self._kubernetes,
                Retry(rng=self._rng, now=time.monotonic),
                LeaseFence(lambda: self._elector.is_leading),
            )

            def record_status(key: ClusterKey, status: control_pb2.GetStatusResponse) -> None:
                reconciler.record_status(key, status)

            def enqueue(key: ClusterKey) -> None:
                self._queue.add(key, STATUS_DEBOUNCE_S)

            connections = self._connections = RouterConnections(
                group, enqueue=enqueue, record_status=record_status, certificates=self._certificates
            )
            if self._certificates is not None:
                group.create_task(keep_fresh([self._certificates.refresh]), name="certificates")
            reconciler = Reconciler(
                kubernetes,
                connections,
                self._settings,
                now=time.monotonic,
                now_text=format_now,
                enqueue=self._queue.add,
                is_edited=self._event_filter.is_edited,
                own_writes=self._own_writes,
                notices=self._notices,
                record_conditions=self._metrics.record_conditions,
            )
            if self._settings.watch_nodes:
                await self._read_nodes(kubernetes)
            for number in range(self._settings.workers):
                group.create_task(self._run_worker(reconciler), name=f"worker {number}")
            group.create_task(self._resync(), name="resync")
            await self._informer.run(self._settings.namespaces, self._is_watching)
            # kopf handles the signals itself while it runs, and returns when one comes.
            raise StoppedError

    async def _wait_for_crd(self) -> None:
        """Waits for the API server, and exits when the CRD is missing: kopf would sit idle without it."""
        while True:
            try:
                if await self._kubernetes.is_served(CLUSTERS):
                    return
                raise SystemExit(
                    f"the API server has no CRD {CLUSTERS.plural}.{CLUSTERS.group}; install the chart with its CRD"
                )
            except KubernetesError as error:
                logger.warning("the API server does not answer yet: %s", error)
                await asyncio.sleep(1.0)

    async def _read_nodes(self, kubernetes: Kubernetes) -> None:
        """Reads all nodes before the first reconcile, which would take back what a former leader planned for them."""
        try:
            for node in await kubernetes.list(NODES, "", {}):
                self._notices.take_node(node)
        except ForbiddenError as error:
            logger.warning("nodes are not watched, so engines leave them once their pods are ended: %s", error)
            return
        except KubernetesError as error:
            logger.warning("nodes could not be read, and are watched all the same: %s", error)
        self._informer.handle_node = self._handle_node

    def _handle_node(self, node: Mapping[str, Any], kind: str | None) -> None:
        for key in self._notices.take_node(node, is_gone=kind == "DELETED"):
            self._queue.add(key)

    async def _run_worker(self, reconciler: Reconciler) -> None:
        while True:
            key = await self._queue.get()
            token = current_object.set(str(key))
            try:
                await self._reconcile(reconciler, key)
            finally:
                current_object.reset(token)

    async def _reconcile(self, reconciler: Reconciler, key: ClusterKey) -> None:
        started_s = time.monotonic()
        outcome = "ok"
        try:
            after_s = await reconciler.reconcile(key)
        except LeaseLostError:
            raise
        except KubernetesError as error:
            outcome = type(error).__name__
            pause_s = self._queue.fail(key, error.retry_after_s or 0.0)
            logger.warning("the reconcile failed and is repeated in %.1f s: %s", pause_s, error)
        except Exception:  # outermost frame of a reconcile: one cluster's fault must not stop the others
            outcome = "fault"
            self._queue.fail(key)
            logger.exception("the reconcile failed unexpectedly")
        else:
            self._queue.finish(key)
            if not reconciler.is_known(key):
                self._known_keys.discard(key)
            if after_s is not None:
                self._queue.add(key, after_s)
        self._event_filter.end_reconcile(key)
        self._metrics.reconciles.labels(outcome).inc()
        self._metrics.reconcile_s.observe(time.monotonic() - started_s)

    async def _resync(self) -> None:
        """Enqueues every cluster from time to time, whatever the watches say."""
        while True:
            await asyncio.sleep(self._settings.resync_s * (1.0 - RESYNC_JITTER))
            spread_s = self._settings.resync_s * RESYNC_JITTER
            for key in list(self._known_keys):
                self._queue.add(key, self._rng.random() * spread_s)

    def _handle_event(self, key: ClusterKey, body: Mapping[str, Any]) -> None:
        self._known_keys.add(key)
        if body.get("kind") == PODS.name:
            self._notices.take_pod(key, body)
        self._event_filter.handle_event(key, body)

    def _is_ready(self) -> bool:
        """A leader is ready once it watches, another replica while it could take over."""
        return self._is_watching.is_set() or (self._elector.is_connected and not self._elector.is_leading)

    def _refresh(self) -> float:
        """Sets the gauges; returns how long the oldest key has been due or in work, in seconds."""
        metrics, age_s = self._metrics, self._queue.age_s()
        metrics.queue.set(len(self._queue))
        metrics.queue_age_s.set(age_s)
        metrics.leader.set(self._elector.is_leading)
        metrics.clusters.set(len(self._known_keys))
        metrics.router_connections.set(self._connections.count() if self._connections else 0)
        if self._informer.last_event_s:
            metrics.event_age_s.set(time.monotonic() - self._informer.last_event_s)
        return age_s


def format_now() -> str:
    """The time, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run_operator(settings: OperatorSettings) -> None:
    """Runs the operator."""
    async with ApiClient(await load_configuration()) as api:
        await Operator(settings, api).run()
