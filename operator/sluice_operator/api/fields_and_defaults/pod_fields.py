"""The fields that engine pods and router pods share: environment, resources, where they run, the pod template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sluice_operator.api.field_types import (
    KeyRef,
    Label,
    ManifestModel,
    ObjectName,
    Quantity,
    ResourceName,
    StringMap,
    Text,
)


class FieldRef(ManifestModel):
    """A field of the pod."""

    field_path: Text
    """Path of the field, such as status.podIP."""


class EnvVarSource(ManifestModel):
    """Where the value of a variable comes from: exactly one."""

    secret_key_ref: KeyRef | None = None
    """Key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """Key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """Field of the pod."""


class EnvVar(ManifestModel):
    """An environment variable of the container."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
    """Name of the variable; names that Sluice sets itself are refused."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value."""
    value_from: EnvVarSource | None = None
    """Where its value comes from, instead of value; not for `sluice up`."""


class ResourceClaim(ManifestModel):
    """A claim of the pod that a container uses."""

    name: Label
    """Name of the claim in the pod."""
    request: Label | None = None
    """One request of the claim; all of them when absent."""


class Resources(ManifestModel):
    """Kubernetes' resource requirements; `sluice up` does not enforce them."""

    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """Limit of each resource, such as nvidia.com/gpu: 1."""
    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """Resources reserved; the limits when absent."""
    claims: Annotated[tuple[ResourceClaim, ...], Field(max_length=16)] = ()
    """Resource claims of the pod that the container uses."""


class Toleration(ManifestModel):
    """Taints that a pod tolerates."""

    key: ResourceName | None = None
    """Key of the taint; any when absent."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal matches the same value, Exists any value."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint (NoSchedule, PreferNoSchedule, NoExecute); any when absent."""
    toleration_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] | None = None
    """Longest time on a node with this taint and effect NoExecute; unlimited when absent."""


class PodFields(ManifestModel):
    """What users may say of engine pods and of router pods."""

    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Further environment variables."""
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(max_length=16)] = ()
    """Secrets that hold the registry's credentials, by name."""
    node_selector: StringMap = Field(default_factory=dict)
    """Labels of the nodes that pods may run on."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """Taints that pods tolerate."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Kubernetes' affinity of the pods."""
    service_account_name: ObjectName | None = None
    """Service account of the pods, for identities at a cloud; one without rights of Sluice's own when absent.
    Pods get no token for the API server by it."""
    pod_template: dict[str, Any] = Field(default_factory=dict)
    """Merged over the pod template that the operator renders, for what has no field here: maps by their keys, lists of
    Kubernetes by their elements' keys; null removes a field. The API server checks the result.
    It cannot reach the host, unless the operator was installed with allowHostAccess."""
