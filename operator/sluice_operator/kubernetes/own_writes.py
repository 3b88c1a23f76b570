"""Recognizes watch events of the operator's own writes, which need no reconcile.

An event is our own if its object has the resourceVersion that the API server returned for our write, and if that
answer is the object that we had read plus our patch. So no foreign write is missed: one before ours makes the answer
differ from our patch, one after ours has another resourceVersion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_operator.kubernetes.objects import uid_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.kubernetes.objects import Object

# About a few megabytes of versions.
MAX_OBJECTS = 20_000
# The server changes these fields with every write.
BOOKKEEPING = frozenset({"resourceVersion", "managedFields"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of an object.

    Args:
        uid: The object's.
        resource_version: The version's; empty when nobody knows.
    """

    uid: str
    resource_version: str


class OwnWrites:
    """The newest version of each object that we wrote ourselves. Mutable.

    Args:
        max_objects: Objects that are remembered. The oldest are forgotten, which costs one reconcile each at most.
    """

    def __init__(self, max_objects: int = MAX_OBJECTS) -> None:
        self._max_objects = max_objects
        self._versions: dict[str, str] = {}

    def record(self, before: Object, patch: Object, answer: Object) -> None:
        """Records a write.

        Args:
            before: The object before it, as it was read.
            patch: The merge patch.
            answer: The object after it, as the API server has it.
        """
        if _strip(merge_patch(before, patch)) != _strip(answer):
            return
        uid = uid_of(answer)
        self._versions.pop(uid, None)
        self._versions[uid] = answer["metadata"]["resourceVersion"]
        if len(self._versions) > self._max_objects:
            del self._versions[next(iter(self._versions))]

    def includes(self, version: Version) -> bool:
        """Whether a version is our own write and nothing else."""
        return bool(version.resource_version) and self._versions.get(version.uid) == version.resource_version


def read_version(body: Mapping[str, Any]) -> Version:
    """The version of an object in an event."""
    metadata = body.get("metadata", {})
    return Version(uid=metadata.get("uid", ""), resource_version=metadata.get("resourceVersion", ""))


def merge_patch(base: Any, patch: Any) -> Any:
    """Applies a JSON merge patch (RFC 7386, section 2); shares what it does not change."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def _strip(content: Object) -> Object:
    """An object without what changes with every write, and without empty maps, which the server leaves out."""
    metadata = {name: value for name, value in content["metadata"].items() if name not in BOOKKEEPING and value != {}}
    return {**content, "metadata": metadata}
