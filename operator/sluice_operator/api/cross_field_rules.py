"""Rules that tie fields of the manifest together. Each is a function from the spec to what breaks it.

``crds/servingclusters.yaml`` states the same rules in CEL; tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice_operator.api.field_types import port_range
from sluice_operator.api.pod_template_rules import find_owned_fields, is_owned_variable
from sluice_operator.api.ports import ENGINE_PORT, GRPC_PORT, METRICS_PORT
from sluice_operator.api.sliders import resolve_sliders, resolve_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sluice_operator.api.field_types import ManifestModel
    from sluice_operator.api.fields_and_defaults.autotune_spec import TokenBounds
    from sluice_operator.api.fields_and_defaults.cluster_spec import SpecFields
    from sluice_operator.api.fields_and_defaults.network_spec import TlsSpec
    from sluice_operator.api.fields_and_defaults.pod_fields import EnvVar, PodFields

MIN_CHUNK_TOKENS = 16
# Ports of an engine pod that the manifest does not choose; the CRD names the same numbers in two CEL rules.
ENGINE_PORTS = {ENGINE_PORT: "the engine's gRPC server", METRICS_PORT: "metrics"}
# Arguments of vLLM that Sluice sets, by their long name; the value says what to use instead.
OWNED_ARGUMENTS = {
    "model": "spec.model",
    "revision": "spec.model.revision",
    "served-model-name": "spec.model.servedName",
    "tensor-parallel-size": "spec.engine.tensorParallelSize",
    "tp": "spec.engine.tensorParallelSize",
    "max-num-batched-tokens": "spec.engine.maxBatchTokens",
    "max-model-len": "spec.engine.maxModelLen",
    "host": "nothing: the operator chooses it",
    "port": "nothing: the operator chooses it",
    "api-key": "spec.router.auth",
    "scheduler-cls": "spec.strategy",
    "scheduling-policy": "spec.strategy",
    "enable-chunked-prefill": "spec.chunkSizes",
    "kv-transfer-config": "spec.network",
    "pipeline-parallel-size": "nothing: not supported",
    "pp": "nothing: not supported",
    "data-parallel-size": "spec.replicas",
    "additional-config": "nothing: Sluice configures its own scheduler",
    "async-scheduling": "nothing: Sluice chooses it",
    "disable-hybrid-kv-cache-manager": "nothing: Sluice chooses it",
    "distributed-executor-backend": "spec.engine.tensorParallelSize",
    "speculative-config": "nothing: not supported",
    "dp": "spec.replicas",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleViolation:
    """A rule that does not hold.

    Args:
        path: The field, from the spec on, in the manifest's names.
        value: Its value.
        message: The limit, and what to do.
    """

    path: tuple[str | int, ...]
    value: Any
    message: str


def find_violations(spec: SpecFields) -> list[tuple[str, RuleViolation]]:
    """Checks all rules; returns what is broken, each with the name of its rule."""
    return [(rule.__name__.lstrip("_"), broken) for rule in RULES for broken in rule(spec)]


def _chunks_fit_the_batch(spec: SpecFields) -> Iterator[RuleViolation]:
    limit = spec.engine.max_batch_tokens
    sizes = {"prefillHeavy": spec.chunk_sizes.prefill_heavy, "decodeHeavy": spec.chunk_sizes.decode_heavy}
    for name, tokens in sizes.items():
        path = ("chunkSizes", name)
        if tokens > limit:
            yield RuleViolation(
                path=path,
                value=tokens,
                message=f"is above engine.maxBatchTokens, {limit}; lower it, or raise that (which restarts engines)",
            )
        elif 0 < tokens < MIN_CHUNK_TOKENS:
            yield RuleViolation(
                path=path,
                value=tokens,
                message=f"is below the least chunk size, {MIN_CHUNK_TOKENS}; raise it, or use 0 for no prefills",
            )


def _count_fits_the_replicas(spec: SpecFields) -> Iterator[RuleViolation]:
    wanted = spec.prefill_heavy
    if isinstance(wanted, int) and wanted > spec.replicas:
        yield RuleViolation(
            path=("prefillHeavy",),
            value=wanted,
            message=f"is above replicas, {spec.replicas}; lower it, raise replicas, or use a percentage",
        )


def _decode_only_needs_two(spec: SpecFields) -> Iterator[RuleViolation]:
    if spec.replicas == 1 and resolve_sliders(spec).decode_heavy_tokens == 0:
        varies = resolve_strategy(spec).sliders.varies_decode_tokens
        cause = "chunkSizes.decodeHeavy 0" if varies else f"strategy {spec.strategy}"
        yield RuleViolation(
            path=("replicas",), value=1, message=f"is too few: {cause} needs a P-heavy and a D-heavy engine; use 2"
        )


def _names_differ(spec: SpecFields) -> Iterator[RuleViolation]:
    lists: dict[tuple[str, ...], list[str]] = {
        ("slo", "classes"): [slo_class.name for slo_class in spec.slo.classes],
        **{(part, "env"): [variable.name for variable in fields.env] for part, fields in _list_pods(spec)},
        ("router", "auth", "limits"): [limits.owner for limits in spec.router.auth.limits],
        ("engine", "resources", "claims"): [claim.name for claim in spec.engine.resources.claims],
        ("router", "resources", "claims"): [claim.name for claim in spec.router.resources.claims],
    }
    for path, items in lists.items():
        for index, name in enumerate(items):
            if name in items[:index]:
                yield RuleViolation(path=(*path, index), value=name, message="is named twice; rename or remove one")


def _one_source(spec: SpecFields) -> Iterator[RuleViolation]:
    source = spec.model.source
    yield from _exactly_one(source, ("model", "source"))
    if source.hugging_face and source.hugging_face.ca_bundle:
        yield from _exactly_one(source.hugging_face.ca_bundle, ("model", "source", "huggingFace", "caBundle"))
    for path, variable in _list_variables(spec):
        if variable.value_from:
            yield from _exactly_one(variable.value_from, (*path, "valueFrom"))


def _list_pods(spec: SpecFields) -> tuple[tuple[str, PodFields], ...]:
    """Lists the parts of the spec that describe pods, by name."""
    return ("engine", spec.engine), ("router", spec.router)


def _list_variables(spec: SpecFields) -> Iterator[tuple[tuple[str | int, ...], EnvVar]]:
    """Lists users' environment variables by their path."""
    for part, fields in _list_pods(spec):
        for index, variable in enumerate(fields.env):
            yield (part, "env", index), variable


def _exactly_one(part: ManifestModel, path: tuple[str | int, ...]) -> Iterator[RuleViolation]:
    given = sorted(part.model_dump(exclude_none=True))
    if len(given) != 1:
        *others, last = (str(field.alias) for field in type(part).model_fields.values())
        yield RuleViolation(
            path=path,
            value=", ".join(given) or "{}",
            message=f"must hold exactly one of {', '.join(others)} and {last}",
        )


def _arguments_are_free(spec: SpecFields) -> Iterator[RuleViolation]:
    for index, argument in enumerate(spec.engine.extra_args):
        name = argument.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")
        if argument.startswith("-") and (name in OWNED_ARGUMENTS or name.split(".", 1)[0] in OWNED_ARGUMENTS):
            instead = OWNED_ARGUMENTS[name.split(".", 1)[0]]
            yield RuleViolation(
                path=("engine", "extraArgs", index),
                value=argument,
                message=f"is set by Sluice; remove it and use {instead}",
            )


def _environment_is_free(spec: SpecFields) -> Iterator[RuleViolation]:
    for path, variable in _list_variables(spec):
        if is_owned_variable(variable.name):
            message = "is set by Sluice; remove it (see spec.network)"
            yield RuleViolation(path=(*path, "name"), value=variable.name, message=message)
        if (variable.value is None) == (variable.value_from is None):
            yield RuleViolation(path=path, value=variable.name, message="needs either value or valueFrom")


def _pod_template_is_free(spec: SpecFields) -> Iterator[RuleViolation]:
    for part, pod in _list_pods(spec):
        for path, value, message in find_owned_fields(pod.pod_template, part):
            yield RuleViolation(path=(part, "podTemplate", *path), value=value, message=message)


def _ports_differ(spec: SpecFields) -> Iterator[RuleViolation]:
    network, service = spec.network, spec.router.service
    if service.port == GRPC_PORT:
        yield RuleViolation(
            path=("router", "service", "port"),
            value=service.port,
            message="is the Service's port of the gRPC API; choose another",
        )
    if network.kv_port in ENGINE_PORTS:
        yield RuleViolation(
            path=("network", "kvPort"),
            value=network.kv_port,
            message=f"is the port of {ENGINE_PORTS[network.kv_port]}; choose another",
        )
    if network.tcp_port_range is None:
        return
    taken = {network.kv_port, *ENGINE_PORTS} & set(port_range(network.tcp_port_range))
    if taken:
        yield RuleViolation(
            path=("network", "tcpPortRange"),
            value=network.tcp_port_range,
            message=f"contains {', '.join(map(str, sorted(taken)))}, used otherwise; choose another range",
        )


def _rdma_is_whole(spec: SpecFields) -> Iterator[RuleViolation]:
    mode, rdma = spec.network.mode, spec.network.rdma
    path: tuple[str, ...] = ("network", "rdma")
    if (mode == "RDMA") != (rdma is not None):
        wanted = (
            "is required by network.mode RDMA" if rdma is None else "needs network.mode RDMA; set it or remove this"
        )
        yield RuleViolation(path=path, value=None if rdma is None else "{...}", message=wanted)
    if rdma is None:
        return
    if (rdma.resource_name is None) == (rdma.resource_claim_template_name is None):
        yield RuleViolation(
            path=(*path, "resourceName"),
            value=rdma.resource_name,
            message="exactly one of resourceName and resourceClaimTemplateName must be set",
        )
    if rdma.gid_index is not None and rdma.fabric != "RoCE":
        yield RuleViolation(
            path=(*path, "gidIndex"), value=rdma.gid_index, message=f"is for RoCE; remove it for {rdma.fabric}"
        )
    has_nvidia = any(name.startswith("nvidia.com/") for name in spec.engine.resources.limits)
    if rdma.transports and has_nvidia and not {"cuda_copy", "cuda_ipc"} & set(rdma.transports):
        yield RuleViolation(
            path=(*path, "transports"),
            value=",".join(rdma.transports),
            message="cannot read GPU memory; add cuda_copy or cuda_ipc",
        )


def _modes_have_what_they_need(spec: SpecFields) -> Iterator[RuleViolation]:
    auth = spec.router.auth
    yield from _needs_mode(("router", "auth"), auth.mode, ("APIKey", "APIKeyOrJWT"), "apiKey", auth.api_key)
    yield from _needs_mode(("router", "auth"), auth.mode, ("JWT", "APIKeyOrJWT"), "jwt", auth.jwt)
    places: dict[tuple[str, str], TlsSpec] = {("router", "tls"): spec.router.tls, ("network", "tls"): spec.network.tls}
    for path, tls in places.items():
        yield from _needs_mode(path, tls.mode, ("SecretRef",), "secretName", tls.secret_name)
        yield from _needs_mode(path, tls.mode, ("CertManager",), "issuerRef", tls.issuer_ref)


def _limits_can_be_kept(spec: SpecFields) -> Iterator[RuleViolation]:
    auth, path = spec.router.auth, ("router", "auth", "limits")
    if auth.limits and auth.mode == "None":
        yield RuleViolation(
            path=path, value="[...]", message="needs another mode than None: without keys nobody is known; remove it"
        )
    known = {"", *(slo_class.name for slo_class in spec.slo.classes)}
    for limits in auth.limits:
        unknown = [name for name in limits.classes if name not in known]
        if unknown:
            listed = ", ".join(sorted(known - {""})) or "none"
            message = f"of {limits.owner} names a class that slo.classes lacks; known are {listed}"
            yield RuleViolation(path=path, value=",".join(unknown), message=message)


def _names_are_for_cert_manager(spec: SpecFields) -> Iterator[RuleViolation]:
    tls = spec.router.tls
    if tls.dns_names and tls.mode != "CertManager":
        yield RuleViolation(
            path=("router", "tls", "dnsNames"),
            value=",".join(tls.dns_names),
            message="needs mode CertManager; remove it: a Secret's certificate has its names",
        )


def _needs_mode(
    path: tuple[str, ...], mode: str, modes: tuple[str, ...], name: str, value: object
) -> Iterator[RuleViolation]:
    """A field that some modes require and the others refuse."""
    if (mode in modes) != (value is not None):
        needed = " or ".join(modes)
        wanted = f"is required by mode {needed}; add it" if value is None else f"needs mode {needed}; remove it"
        yield RuleViolation(path=(*path, name), value=None if value is None else "{...}", message=wanted)


def _bounds_are_ordered(spec: SpecFields) -> Iterator[RuleViolation]:
    bounds, limit = spec.autotune.bounds, spec.engine.max_batch_tokens
    path = ("autotune", "bounds")
    if bounds.replicas and bounds.replicas.min > bounds.replicas.max:
        yield _unordered((*path, "replicas"), bounds.replicas.min, bounds.replicas.max)
    if bounds.prefill_heavy:
        low, high = bounds.prefill_heavy.min, bounds.prefill_heavy.max
        if type(low) is not type(high):
            yield RuleViolation(
                path=(*path, "prefillHeavy"), value=f"{low}, {high}", message="must be two counts or two percentages"
            )
        elif int(str(low).rstrip("%")) > int(str(high).rstrip("%")):
            yield _unordered((*path, "prefillHeavy"), low, high)
    chunks: dict[str, TokenBounds | None] = {
        "prefillHeavy": bounds.chunk_sizes.prefill_heavy,
        "decodeHeavy": bounds.chunk_sizes.decode_heavy,
    }
    for name, chunk in chunks.items():
        if chunk and chunk.min > chunk.max:
            yield _unordered((*path, "chunkSizes", name), chunk.min, chunk.max)
        if chunk and chunk.max > limit:
            yield RuleViolation(
                path=(*path, "chunkSizes", name, "max"),
                value=chunk.max,
                message=f"is above engine.maxBatchTokens, {limit}; lower it or raise that",
            )


def _unordered(path: tuple[str | int, ...], low: object, high: object) -> RuleViolation:
    return RuleViolation(path=(*path, "min"), value=low, message=f"is above max, {high}; swap them")


def _a_roll_goes_on(spec: SpecFields) -> Iterator[RuleViolation]:
    rollout = spec.rollout
    if rollout.max_unavailable in (0, "0%") and rollout.max_surge in (0, "0%"):
        yield RuleViolation(
            path=("rollout", "maxUnavailable"),
            value=rollout.max_unavailable,
            message="must not be 0 while maxSurge is 0; use 1, or a surge of 1",
        )
    gate = rollout.gate
    if gate is not None and gate.timeout_seconds < gate.duration_seconds:
        yield RuleViolation(
            path=("rollout", "gate", "timeoutSeconds"),
            value=gate.timeout_seconds,
            message=f"is below durationSeconds, {gate.duration_seconds}; raise it, or lower that",
        )


def _scaling_has_bounds(spec: SpecFields) -> Iterator[RuleViolation]:
    scaling, path = spec.autoscaling, ("autoscaling",)
    if scaling.max_replicas is None:
        if scaling.mode != "Disabled":
            message = f"is required by mode {scaling.mode}; add it"
            yield RuleViolation(path=(*path, "maxReplicas"), value=None, message=message)
    elif scaling.min_replicas > scaling.max_replicas:
        yield RuleViolation(
            path=(*path, "minReplicas"),
            value=scaling.min_replicas,
            message=f"is above maxReplicas, {scaling.max_replicas}; lower it, or raise that",
        )


def _scaling_keeps_roles(spec: SpecFields) -> Iterator[RuleViolation]:
    scaling, bounds = spec.autoscaling, spec.autotune.bounds.prefill_heavy
    if scaling.mode == "Disabled":
        return
    if str(spec.prefill_heavy).isdecimal():
        message = "is a count, which does not follow the engines of autoscaling; use a percentage"
        yield RuleViolation(path=("prefillHeavy",), value=spec.prefill_heavy, message=message)
    if bounds and (str(bounds.min).isdecimal() or str(bounds.max).isdecimal()):
        message = "must be percentages: counts do not follow the engines of autoscaling"
        yield RuleViolation(path=("autotune", "bounds", "prefillHeavy"), value=str(bounds.min), message=message)
    if resolve_sliders(spec).decode_heavy_tokens == 0:
        for name, value in (("minReplicas", scaling.min_replicas), ("maxReplicas", scaling.max_replicas)):
            if value == 1:
                message = "is too few: prefills and decodes have engines of their own; use 2"
                yield RuleViolation(path=("autoscaling", name), value=1, message=message)


RULES: tuple[Callable[[SpecFields], Iterator[RuleViolation]], ...] = (
    _chunks_fit_the_batch,
    _count_fits_the_replicas,
    _decode_only_needs_two,
    _names_differ,
    _one_source,
    _arguments_are_free,
    _environment_is_free,
    _pod_template_is_free,
    _ports_differ,
    _rdma_is_whole,
    _modes_have_what_they_need,
    _limits_can_be_kept,
    _names_are_for_cert_manager,
    _bounds_are_ordered,
    _a_roll_goes_on,
    _scaling_has_bounds,
    _scaling_keeps_roles,
)
