"""Why a pod does not serve: the reason and message of a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_operator.api.condition_types import Failure, Reason
from sluice_operator.api.model_identity import REVISION_KEY_PREFIX
from sluice_operator.api.names import ENGINE
from sluice_operator.api.runbook_links import refer_to_runbook
from sluice_operator.kubernetes.objects import name_of
from sluice_operator.resources.pods.rdma import PREFLIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sluice_operator.kubernetes.objects import Object

# A container that ended this often is not one that was moved or killed once.
CRASH_LOOP_RESTARTS = 2
# The engine's, where RDMA is required and KV would not go over it.
NO_RDMA_EXIT_CODE = 6
# The engine's, where it cannot start whatever is tried: its command line, vLLM's version, the model.
ENGINE_REFUSAL_EXIT_CODES = frozenset({2, 3, 7})
WAITING_REASONS = {
    "ImagePullBackOff": Reason.IMAGE_PULL_BACK_OFF,
    "ErrImagePull": Reason.IMAGE_PULL_BACK_OFF,
    "InvalidImageName": Reason.IMAGE_PULL_BACK_OFF,
    "ErrImageNeverPull": Reason.IMAGE_PULL_BACK_OFF,
    "CrashLoopBackOff": Reason.CRASH_LOOP,
    "CreateContainerConfigError": Reason.MOUNT_FAILED,
    "CreateContainerError": Reason.MOUNT_FAILED,
}


def find_pod_failure(pod: Object) -> Failure | None:
    """Finds what is wrong with a pod first; None: nothing is."""
    return next(_list_failures(name_of(pod), pod.get("status") or {}), None)


def _list_failures(name: str, status: Object) -> Iterator[Failure]:
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            advice = "free or add nodes, or ask for less in spec.engine.resources"
            yield Failure(
                reason=Reason.UNSCHEDULABLE, message=f"pod {name} fits no node ({condition.get('message')}); {advice}"
            )
    preparations = status.get("initContainerStatuses") or []
    for container in [*preparations, *(status.get("containerStatuses") or [])]:
        yield from _find_container_failure(name, container)


def is_rdma_refusal(container: Object, ended: Object) -> bool:
    """Whether a container ended because RDMA cannot be used: the check before the engine, or the engine's own."""
    if container["name"] == PREFLIGHT:
        return bool(ended.get("exitCode"))
    return not container.get("ready") and ended.get("exitCode") == NO_RDMA_EXIT_CODE


def is_engine_refusal(container: Object, ended: Object) -> bool:
    """Whether an engine ended because it cannot start, so that the next try ends the same."""
    is_engine = container["name"] == ENGINE and not container.get("ready")
    return is_engine and ended.get("exitCode") in ENGINE_REFUSAL_EXIT_CODES


def _find_container_failure(pod: str, container: Object) -> Iterator[Failure]:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = WAITING_REASONS.get(waiting.get("reason", ""))
    if REVISION_KEY_PREFIX in (waiting.get("message") or ""):
        # It waits until the operator has stored the revision.
        return
    ended = (container.get("lastState") or {}).get("terminated") or (container.get("state") or {}).get("terminated")
    where = f"container {container['name']} of pod {pod}"
    if ended and is_rdma_refusal(container, ended):
        what = ended.get("message") or f"exit code {ended.get('exitCode')}"
        yield Failure(reason=Reason.PREFLIGHT_FAILED, message=f"{where}: {what}")
    elif ended and is_engine_refusal(container, ended):
        what = ended.get("message") or f"exit code {ended.get('exitCode')}"
        advice = f"it starts when the spec or the model is another; {refer_to_runbook(Reason.ENGINE_REFUSED)}"
        yield Failure(reason=Reason.ENGINE_REFUSED, message=f"{where} refuses to start: {what}; {advice}")
    elif reason is Reason.CRASH_LOOP or (
        not container.get("ready") and ended and container.get("restartCount", 0) >= CRASH_LOOP_RESTARTS
    ):
        how = f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode')}" if ended else "it keeps ending"
        yield Failure(
            reason=Reason.CRASH_LOOP,
            message=f"{where} keeps ending ({how}); read `kubectl logs {pod} -c {container['name']} --previous`",
        )
    elif reason is Reason.IMAGE_PULL_BACK_OFF:
        # The kubelet's message changes with every attempt; a message that changes is a status write each time.
        advice = "check its name, and that the node may pull it"
        yield Failure(reason=reason, message=f"image {container.get('image')} of {where} cannot be pulled; {advice}")
    elif reason:
        said = waiting.get("message") or waiting.get("reason")
        yield Failure(reason=reason, message=f"{where} cannot start: {said}; read `kubectl describe pod {pod}`")
