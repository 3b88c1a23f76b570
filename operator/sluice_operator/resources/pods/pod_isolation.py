"""Finds what would let a pod reach its node, privileges, or pods of other namespaces.

The merged template is checked, because removing a limit that Sluice sets is as harmful as adding a privilege. Allowed
is what Pod Security ``restricted`` allows; the API server enforces the namespace's own level besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sluice_operator.kubernetes.objects import Object

ADVICE = "reaches the host; remove it, or have the operator started with --allow-host-access"
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
# Pod Security "restricted", and images, which are volumes that the kubelet pulls. Others are mounted by the node, from
# anywhere, some by programs of the node.
VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
CAPABILITIES = frozenset({"IPC_LOCK", "NET_BIND_SERVICE"})
# Types of SELinux that confine a container; user and role may not be set at all (Pod Security "baseline").
SELINUX_TYPES = frozenset({None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
SECCOMP_TYPES = frozenset({"RuntimeDefault", "Localhost"})
# The older way to say appArmorProfile.
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
CONTAINER_KINDS = ("containers", "initContainers", "ephemeralContainers")


def find_isolation_violations(template: Object, ours: Collection[str]) -> Iterator[str]:
    """Finds the fields by which a pod would leave its namespace.

    Args:
        template: The pod template, merged.
        ours: Containers that must keep the limits that Sluice sets; others only must not ask for privileges.

    Yields:
        A line for each field, from the template on, with what to do.
    """
    spec = template["spec"]
    yield from (f"spec.{field} {ADVICE}" for field in HOST_FIELDS if spec.get(field))
    for volume in spec.get("volumes") or []:
        yield from _find_in_volume(volume)
    yield from _find_in_pod_security(spec.get("securityContext") or {})
    for kind in CONTAINER_KINDS:
        for container in spec.get(kind) or []:
            yield from _find_in_container(container, f"spec.{kind}[{container.get('name')}]", ours)
    for name, value in ((template.get("metadata") or {}).get("annotations") or {}).items():
        if name.startswith(APPARMOR_ANNOTATION) and value == "unconfined":
            yield f"metadata.annotations[{name}] is unconfined, which {ADVICE}"
    yield from find_cross_namespace_terms(spec.get("affinity") or {}, "spec.affinity")


def find_cross_namespace_terms(affinity: Object, path: str) -> Iterator[str]:
    """Finds affinity terms that select pods of other namespaces: they could keep those from being scheduled."""
    advice = "reaches other namespaces; remove it, or have the operator started with --allow-host-access"
    for kind in ("podAffinity", "podAntiAffinity"):
        rules = affinity.get(kind) or {}
        for name, weighted in rules.items():
            for item in weighted or []:
                term = item.get("podAffinityTerm") or item
                # An empty selector is every namespace, an empty list the pod's own.
                if term.get("namespaces") or term.get("namespaceSelector") is not None:
                    yield f"{path}.{kind}.{name} {advice}"


def _find_in_volume(volume: Object) -> Iterator[str]:
    path = f"spec.volumes[{volume.get('name')}]"
    for kind, source in volume.items():
        if kind != "name" and source is not None and kind not in VOLUMES:
            yield f"{path}.{kind} {ADVICE}, or bring it as a persistentVolumeClaim"
    sources = (volume.get("projected") or {}).get("sources") or []
    if any("serviceAccountToken" in source for source in sources):
        yield f"{path} holds a service account's token; engines have none, remove it"
    claim = ((volume.get("ephemeral") or {}).get("volumeClaimTemplate") or {}).get("spec") or {}
    if (claim.get("dataSourceRef") or {}).get("namespace"):
        yield f"{path} takes its data from another namespace; remove dataSourceRef.namespace"


def _find_in_pod_security(context: Object) -> Iterator[str]:
    path = "spec.securityContext"
    yield from _find_privileges(context, path)
    if context.get("runAsNonRoot") is not True:
        yield f"{path} does not say runAsNonRoot, and root {ADVICE}"
    if (context.get("seccompProfile") or {}).get("type") not in SECCOMP_TYPES:
        yield f"{path} is unconfined by seccomp, which {ADVICE}"


def _find_in_container(container: Object, path: str, ours: Collection[str]) -> Iterator[str]:
    context = container.get("securityContext") or {}
    inner = f"{path}.securityContext"
    yield from _find_privileges(context, inner)
    is_ours = container.get("name") in ours
    may_escalate = context.get("allowPrivilegeEscalation")
    if may_escalate or (is_ours and may_escalate is not False):
        yield f"{inner}.allowPrivilegeEscalation {ADVICE}"
    if context.get("runAsNonRoot") is False:
        yield f"{inner}.runAsNonRoot is false, and root {ADVICE}"
    if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") not in SECCOMP_TYPES:
        yield f"{inner} is unconfined by seccomp, which {ADVICE}"
    if is_ours and "ALL" not in ((context.get("capabilities") or {}).get("drop") or []):
        yield f"{inner}.capabilities.drop does not hold ALL, which {ADVICE}"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield f"{path}.ports has a hostPort, which {ADVICE}"
    if container.get("volumeDevices"):
        yield f"{path}.volumeDevices {ADVICE}"


def _find_privileges(context: Object, path: str) -> Iterator[str]:
    if context.get("privileged"):
        yield f"{path}.privileged {ADVICE}"
    if context.get("procMount") not in (None, "Default"):
        yield f"{path}.procMount {ADVICE}"
    if context.get("sysctls"):
        yield f"{path}.sysctls {ADVICE}"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess {ADVICE}"
    if context.get("runAsUser") == 0:
        yield f"{path}.runAsUser is root, which {ADVICE}"
    if (context.get("appArmorProfile") or {}).get("type") == "Unconfined":
        yield f"{path}.appArmorProfile is unconfined, which {ADVICE}"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{path}.seLinuxOptions {ADVICE}"
    added = set((context.get("capabilities") or {}).get("add") or []) - CAPABILITIES
    if added:
        yield f"{path}.capabilities.add holds {', '.join(sorted(added))}, which {ADVICE}"
