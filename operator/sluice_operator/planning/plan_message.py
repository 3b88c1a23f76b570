"""Renders the plan: the one message that the control plane hands to the data plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.v1 import plan_pb2
from sluice_operator.api.field_types import percent
from sluice_operator.api.model_identity import identify_model
from sluice_operator.api.proto_roles import PROTO_ROLES
from sluice_operator.api.sliders import Sliders, resolve_sliders, resolve_strategy, write_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sluice_core.records import EngineId, Role
    from sluice_operator.api.fields_and_defaults.cluster_spec import SpecFields
    from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec
    from sluice_operator.api.fields_and_defaults.slo_spec import SloSpec
    from sluice_operator.api.serving_cluster import ServingCluster


def render_plan(
    cluster: ServingCluster,
    roles: Mapping[EngineId, Role],
    *,
    generation: int,
    cluster_uid: str,
    draining: Collection[EngineId] = frozenset(),
    served_models: Sequence[ModelSpec] = (),
) -> plan_pb2.Plan:
    """Renders the plan: the only thing that the control plane hands to the data plane.

    Args:
        cluster: The manifest.
        roles: Each engine's role (see ``assign_roles``); draining engines may be among them.
        generation: Number of the plan, above that of every earlier one.
        cluster_uid: Uid of the cluster.
        draining: Engines that hand their work over.
        served_models: The model that new requests are for, then the one that it replaces; the manifest's alone when
            empty.
    """
    spec = cluster.spec
    sliders = resolve_sliders(spec)
    strategy = resolve_strategy(spec)
    models = served_models or (spec.model,)
    return plan_pb2.Plan(
        cluster_uid=cluster_uid,
        generation=generation,
        strategy=strategy.name,
        strategy_parameters=write_parameters(spec, strategy.parameters),
        slo_classes=_render_slo_classes(spec.slo),
        attainment_percent=percent(spec.slo.attainment),
        engines=[_render_engine(each, role, sliders, is_draining=each in draining) for each, role in roles.items()],
        unnamed_chunk_size_tokens=sliders.decode_heavy_tokens,
        # Routers that know no id were made before ids were: what they serve is the older model.
        served_model_name=models[-1].served_name or models[-1].name,
        served_models=[
            plan_pb2.ServedModel(model_id=identify_model(model), served_name=model.served_name or model.name)
            for model in models
        ],
        num_routers=spec.router.num_routers,
        hold_seconds=count_hold_seconds(spec),
        owner_limits=[plan_pb2.OwnerLimits(**limits.model_dump(by_alias=False)) for limits in spec.router.auth.limits],
    )


def _render_engine(engine_id: EngineId, role: Role, sliders: Sliders, *, is_draining: bool) -> plan_pb2.EnginePlan:
    return plan_pb2.EnginePlan(
        engine_id=engine_id,
        role=PROTO_ROLES[role],
        chunk_size_tokens=sliders.chunk_size_tokens(role),
        is_draining=is_draining,
    )


def _render_slo_classes(slo: SloSpec) -> list[plan_pb2.SloClass]:
    """Renders the classes of objectives; the first one is of requests that name none."""
    default = plan_pb2.SloClass(ttft_milliseconds=slo.ttft_milliseconds, tpot_milliseconds=slo.tpot_milliseconds)
    return [default, *(plan_pb2.SloClass(**named.model_dump(by_alias=False)) for named in slo.classes)]


def count_hold_seconds(spec: SpecFields) -> int:
    """Counts the seconds that routers hold a request while there is to be no engine; 0 where there always is one."""
    scaling = spec.autoscaling
    if scaling.mode != "Apply" or scaling.min_replicas:
        return 0
    return scaling.hold_timeout_seconds or spec.engine.startup_timeout_seconds
