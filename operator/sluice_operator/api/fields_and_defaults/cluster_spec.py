"""The fields of a ServingCluster's spec: each with its default, its bounds and what a change of it does.

The operator and ``sluice up`` read manifests by these models. Rules that tie fields together are in
``cross_field_rules``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import MAX_ENGINES, CountOrPercentage, Label, ManifestModel
from sluice_operator.api.fields_and_defaults.autoscaling_spec import AutoscalingSpec
from sluice_operator.api.fields_and_defaults.autotune_spec import AutotuneSpec
from sluice_operator.api.fields_and_defaults.engine_spec import EngineSpec
from sluice_operator.api.fields_and_defaults.model_spec import ModelSpec  # noqa: TC001 - pydantic looks it up
from sluice_operator.api.fields_and_defaults.network_spec import NetworkSpec
from sluice_operator.api.fields_and_defaults.rollout_spec import RolloutSpec
from sluice_operator.api.fields_and_defaults.router_spec import RouterSpec
from sluice_operator.api.fields_and_defaults.slider_spec import ChunkSizes, ParametersSpec
from sluice_operator.api.fields_and_defaults.slo_spec import SloSpec  # noqa: TC001 - pydantic looks it up

StrategyName = Literal[
    "TaiChi", "Aggregated", "Disaggregated", "DynaServe", "FlowPrefill", "EcoServe", "Sluice", "Auto"
]


class SpecFields(ManifestModel):
    """What the user wants; ``ServingClusterSpec`` adds the rules that tie fields together."""

    replicas: Annotated[int, FieldEffect.LIVE, Field(strict=True, ge=1, le=MAX_ENGINES)] = 2
    """Number of engines. In force without a restart; streams of removed engines continue on others."""
    prefill_heavy: Annotated[CountOrPercentage, FieldEffect.LIVE] = "50%"
    """P-heavy engines (slider R_PD), as a count or a share of replicas, rounded half up. In force without a restart.
    Use a share when replicas are scaled automatically: a count above replicas is refused, on scaling too."""
    chunk_sizes: Annotated[ChunkSizes, FieldEffect.LIVE] = ChunkSizes()
    """Most tokens that one iteration processes, decodes included, by role. In force without a restart."""
    slo: Annotated[SloSpec, FieldEffect.LIVE]
    """Latency objectives. In force without a restart, for requests that arrive from then on."""
    strategy: Annotated[StrategyName, FieldEffect.LIVE] = "Sluice"
    """How engines share prefills and decodes; in force without a restart.
    Sluice gives every engine engine.maxBatchTokens and sizes each iteration by what decodes can spare; it has no
    sliders. TaiChi uses the sliders as given. Aggregated gives every engine chunkSizes.prefillHeavy and decodes in
    place. EcoServe gives every engine engine.maxBatchTokens for iterations of prefills, in which decodes wait.
    DynaServe gives every engine engine.maxBatchTokens, sizes each iteration by its target for the time between tokens,
    and splits a request between two engines where that balances them.
    Disaggregated gives P-heavy engines engine.maxBatchTokens and D-heavy engines no prefills;
    docs/internals/strategies.md says how it follows DistServe. FlowPrefill uses the sliders as given;
    the prompt whose TTFT objective ends first preempts others where an iteration ends, so smaller chunk sizes
    let it in sooner.
    Auto lets the search of autotune choose the strategy with its sliders; in mode Apply it changes live.
    Until a search has chosen, and outside mode Apply, Auto is Sluice; the condition Autotuned says which it is."""
    parameters: Annotated[ParametersSpec, FieldEffect.LIVE] = ParametersSpec()
    """Parameters of the strategies. In force without a restart."""
    model: Annotated[ModelSpec, FieldEffect.RESTARTS_ALL]
    """The model, mounted read-only at /model in engines and routers. Another one comes up beside it and takes its
    place, as rollout allows; no answer mixes the two (docs/guides/rollouts.md)."""
    engine: Annotated[EngineSpec, FieldEffect.RESTARTS_ENGINES] = EngineSpec()
    """The engines. A change restarts them as rollout allows; streams continue."""
    network: Annotated[NetworkSpec, FieldEffect.RESTARTS_ENGINES] = NetworkSpec()
    """How KV moves between engines. A change restarts engines as rollout allows; streams continue."""
    router: Annotated[RouterSpec, FieldEffect.RESTARTS_ROUTERS] = RouterSpec()
    """The routers. A change restarts them one at a time, except a change of replicas."""
    rollout: Annotated[RolloutSpec, FieldEffect.LIVE] = RolloutSpec()
    """How engines are replaced when a field that restarts them changes. In force without a restart."""
    autotune: Annotated[AutotuneSpec, FieldEffect.LIVE] = AutotuneSpec()
    """The search for better sliders; its results go to the status, never to the spec."""
    autoscaling: Annotated[AutoscalingSpec, FieldEffect.LIVE] = AutoscalingSpec()
    """How many engines what arrives needs; the number goes to the status, never to the spec."""


class Metadata(ManifestModel):
    """The object's name; what else Kubernetes keeps there is not ours."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=45)]
    """Name of the cluster; short enough for the names of Services derived from it."""
    namespace: Label = "default"
    """Its namespace; `sluice up` has none."""
    uid: str = ""
    """Kubernetes' uid; `sluice up` makes one."""
