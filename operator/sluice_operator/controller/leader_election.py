"""Leader election by a Lease: 15 s long, renewed every 2 s, given up when it could not be renewed for 10 s.

Whether another replica's lease has expired is decided by our own monotonic clock, from the moment its record last
changed. The times in the record are not compared, because clocks of nodes differ and step.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sluice_operator.kubernetes.errors import ConflictError, KubernetesError, LeaseLostError
from sluice_operator.kubernetes.kinds import LEASES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sluice_operator.kubernetes.interface import Kubernetes
    from sluice_operator.kubernetes.objects import Object

logger = logging.getLogger(__name__)

LEASE_S = 15
RENEW_DEADLINE_S = 10.0
RENEW_S = 2.0
# A failed renewal is repeated sooner: with RENEW_S, five faults in a row would end the process.
RETRY_S = 0.5


class LeaderElector:
    """Takes part in the election.

    Args:
        kubernetes: The API server, unfenced: renewing is what the fence waits for.
        namespace: Namespace of the Lease.
        name: Its name.
        identity: Name of this replica, unique among them.
        now: Monotonic seconds.
        now_text: The time, as Kubernetes writes it, with microseconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        *,
        namespace: str,
        name: str,
        identity: str,
        now: Callable[[], float],
        now_text: Callable[[], str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kubernetes = kubernetes
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._now = now
        self._now_text = now_text
        self._sleep = sleep
        self._renewed_s = float("-inf")
        self._reached_s = float("-inf")
        # The record of another holder, and when we first saw it as it is.
        self._observed_record: object = None
        self._observed_s = 0.0

    @property
    def is_leading(self) -> bool:
        """Whether the lease is held for certain: no write may begin without."""
        return self._now() - self._renewed_s < RENEW_DEADLINE_S

    @property
    def is_connected(self) -> bool:
        """Whether the API server showed the lease within the time of a lease."""
        return self._now() - self._reached_s < LEASE_S

    async def try_acquire_or_renew(self) -> bool:
        """Takes or renews the lease, if that is possible now; returns whether it was.

        Raises:
            KubernetesError: The API server did not do it; ``is_leading`` says whether that matters already.
        """
        started_s = self._now()
        lease = await self._kubernetes.get(LEASES, self._namespace, self._name)
        self._reached_s = self._now()
        try:
            if lease is None:
                await self._kubernetes.create(self._render())
            elif self._may_acquire(lease):
                await self._kubernetes.patch(LEASES, self._namespace, self._name, self._render(lease))
            else:
                self._renewed_s = float("-inf")
                return False
        except ConflictError:
            # Another replica was faster; the next attempt reads its record.
            return False
        # Counted from before the request: the server may have acted at once and answered late.
        self._renewed_s = started_s
        return True

    async def acquire(self) -> None:
        """Waits until this replica leads."""
        while not await self._try_and_log():
            await self._sleep(RENEW_S)
        logger.info("%s is the leader", self._identity)

    async def renew(self) -> None:
        """Renews the lease for ever.

        Raises:
            LeaseLostError: It could not be renewed in time, or another replica has it.
        """
        pause_s = RENEW_S
        while True:
            await self._sleep(pause_s)
            pause_s = RENEW_S if await self._try_and_log() else RETRY_S
            if not self.is_leading:
                raise LeaseLostError(f"{self._identity} no longer leads: the lease was not renewed in time")

    async def release(self) -> None:
        """Gives the lease back, so that another replica leads at once."""
        if not self.is_leading:
            return
        self._renewed_s = float("-inf")
        try:
            lease = await self._kubernetes.get(LEASES, self._namespace, self._name)
            if lease and lease["spec"].get("holderIdentity") == self._identity:
                version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
                released = {"metadata": version, "spec": {"holderIdentity": None, "leaseDurationSeconds": 1}}
                await self._kubernetes.patch(LEASES, self._namespace, self._name, released)
        except KubernetesError as error:
            logger.warning("the lease was not released, it expires by itself: %s", error)

    async def _try_and_log(self) -> bool:
        try:
            return await self.try_acquire_or_renew()
        except KubernetesError as error:
            logger.warning("the lease was not renewed: %s", error)
            return False

    def _may_acquire(self, lease: Object) -> bool:
        spec: Object = lease["spec"]
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        record = holder, spec.get("renewTime"), spec.get("leaseTransitions")
        if record != self._observed_record:
            self._observed_record, self._observed_s = record, self._now()
        return self._now() - self._observed_s >= float(spec.get("leaseDurationSeconds", LEASE_S))

    def _render(self, lease: Object | None = None) -> Object:
        old = lease["spec"] if lease else {}
        is_ours = old.get("holderIdentity") == self._identity
        metadata = {"name": self._name, "namespace": self._namespace}
        if lease:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        text = self._now_text()
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.name,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_S,
                "acquireTime": old.get("acquireTime", text) if is_ours else text,
                "renewTime": text,
                "leaseTransitions": old.get("leaseTransitions", 0) + (0 if is_ours or not lease else 1),
            },
        }
