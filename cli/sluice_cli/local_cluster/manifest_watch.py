"""Follows the manifest file: applies each valid edit, and reports what it does or why it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import watchfiles

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.fields_and_defaults.rollout_spec import RolloutSpec
from sluice_operator.api.manifest import ManifestError, ManifestProblem, parse_manifest, read_manifest_text
from sluice_operator.api.spec_changes import FieldChange, diff_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sluice_cli.local_cluster.cluster import LocalCluster
    from sluice_operator.api.serving_cluster import ServingCluster, ServingClusterSpec

# Editors write in several steps; wait until a file has been quiet for so long.
SETTLE_MS = 100
POLL_MS = 1000
# What only pods follow.
IGNORED_FIELDS = ("spec.rollout.maxUnavailable", "spec.rollout.maxSurge")
IGNORED = "ignored: local engines restart one at a time"


async def follow_manifest(
    path: Path,
    text: str,
    cluster: LocalCluster,
    check: Callable[[ServingCluster], list[ManifestProblem]],
    report: Callable[[str], None],
) -> None:
    """Applies each valid edit of a manifest to a cluster, until cancelled.

    Args:
        path: The manifest.
        text: Its text when the cluster was made from it.
        cluster: The cluster that follows it.
        check: Finds what this machine cannot do.
        report: Takes a line for people.
    """
    for field in find_ignored_fields(cluster.manifest.spec):
        report(f"{path.name}: {field} ({IGNORED})")
    last_text, last_fault = text, ""
    # The folder is watched, because many editors replace the file by another. A read each second finds what was written
    # before the watch began, and edits on file systems that report none.
    watch = watchfiles.awatch(
        path.parent,
        debounce=SETTLE_MS,
        recursive=False,
        rust_timeout=POLL_MS,
        yield_on_timeout=True,
    )
    async for _ in watch:
        try:
            found = read_manifest_text(path)
        except ManifestError as error:
            # Where there is no file, an editor is about to replace it.
            if str(error) != last_fault and not isinstance(error.__cause__, FileNotFoundError):
                _refuse(path, error.problems, report)
            last_fault = str(error)
            continue
        last_fault = ""
        if found != last_text:
            last_text = found
            apply_edit(found, path, cluster, check, report)


def apply_edit(
    text: str,
    path: Path,
    cluster: LocalCluster,
    check: Callable[[ServingCluster], list[ManifestProblem]],
    report: Callable[[str], None],
) -> bool:
    """Applies an edit, or says why not; then the old plan stays.

    Returns:
        True if it was applied or changes nothing.
    """
    try:
        manifest = parse_manifest(text)
    except ManifestError as error:
        return _refuse(path, error.problems, report)
    problems = check(manifest) + _check_name(manifest, cluster.manifest)
    if problems:
        return _refuse(path, problems, report)
    changes = diff_specs(cluster.manifest.spec, manifest.spec)
    for change in changes:
        report(f"{path.name}: {change} ({describe_effect(change)})")
    if changes:
        cluster.apply(manifest)
    return True


def _refuse(path: Path, problems: Sequence[ManifestProblem], report: Callable[[str], None]) -> bool:
    report(f"{path.name} refused, the cluster stays as it is:")
    for problem in problems:
        report(f"  {problem}")
    return False


def find_ignored_fields(spec: ServingClusterSpec) -> list[str]:
    """Finds the fields that a manifest sets and local processes do not follow."""
    changes = diff_specs(spec.model_copy(update={"rollout": RolloutSpec()}), spec)
    return [change.field for change in changes if change.field.startswith(IGNORED_FIELDS)]


def describe_effect(change: FieldChange) -> str:
    """Says what a change does to the running cluster."""
    if change.field.startswith(IGNORED_FIELDS):
        return IGNORED
    match change.effect:
        case FieldEffect.LIVE:
            return "live"
        case FieldEffect.RESTARTS_ENGINES:
            return "restarts engines one at a time, after each has handed its requests over"
        case FieldEffect.RESTARTS_ROUTERS:
            return "restarts routers, after their streams have ended"
        case FieldEffect.RESTARTS_ALL:
            return "stops the cluster and starts it again"


def _check_name(new: ServingCluster, old: ServingCluster) -> list[ManifestProblem]:
    if new.metadata.name == old.metadata.name:
        return []
    message = (
        f"{new.metadata.name!r} is another cluster than the running {old.metadata.name!r};"
        " start it with its own `sluice up`"
    )
    return [ManifestProblem(field="metadata.name", message=message)]
