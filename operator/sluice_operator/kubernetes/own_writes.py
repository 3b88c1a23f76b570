"""Events that only say what we have just written ourselves: no look is needed for them.

An event is such an echo if its object is, to the version, what the API server answered to a write of ours, and if that
answer is what we had seen before with our patch in it and nothing else. Somebody who wrote in between, before our write
or after it, is therefore never missed: in the first case the answer has more in it than our patch, in the second the
event names another version.

Events may be faster than answers. Those that come during a look are judged at its end (``program``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_operator.kubernetes.interface import uid_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sluice_operator.kubernetes.interface import Object

# A few megabytes.
MAX_OBJECTS = 20_000
# The server counts and signs each write there.
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
    """What was written last, by object. Mutable.

    Args:
        max_objects: Objects whose last version of ours is remembered; those written longest ago are forgotten, and cost
            a look at most.
    """

    def __init__(self, max_objects: int = MAX_OBJECTS) -> None:
        self._max_objects = max_objects
        self._versions: dict[str, str] = {}

    def record(self, before: Object, patch: Object, answer: Object) -> None:
        """Notes a write.

        Args:
            before: The object before it, as the look went by.
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
        """Whether this is what we have written ourselves, and nothing else."""
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
