"""The fields of a ServingCluster's spec: each with its default, its bounds and what a change of it does.

The operator and ``sluice up`` read manifests by these models. ``model_spec`` has what is below ``model``, and
``pod_fields`` what engines and routers share. Rules that tie fields together are in ``validation``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from sluice_core.slo import DEFAULT_ATTAINMENT
from sluice_operator.api.autoscaling_spec import AutoscalingSpec
from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.field_types import (
    DISABLED_IS_OFF,
    MAX_ENGINES,
    OPTIONAL_RESOURCE_NAME,
    CountOrPercentage,
    ErrorRate,
    HostName,
    Label,
    ManifestModel,
    ObjectName,
    Percentage,
    Port,
    PortRange,
    Quantity,
    ResourceName,
    StrictBool,
    StringMap,
    Text,
)
from sluice_operator.api.model_spec import ModelSpec  # noqa: TC001 - pydantic looks it up
from sluice_operator.api.pod_fields import PodFields, Resources

# Largest chunk size of all, in tokens.
MAX_BATCH_TOKENS = 1_048_576
# Largest limit of an owner of API keys.
MAX_LIMIT = 2**31 - 1

EarlyRejectionName = Literal["Disabled", "Off", "Random", "Reject"]
AutotuneMode = Literal["Disabled", "Off", "Recommend", "Apply"]
StrategyName = Literal[
    "TaiChi", "Aggregated", "Disaggregated", "DynaServe", "FlowPrefill", "EcoServe", "Sluice", "Auto"
]


class ChunkSizes(ManifestModel):
    """Most tokens that one iteration processes, decodes included, by role (sliders S_P and S_D)."""

    prefill_heavy: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)] = 1024
    """Chunk size of P-heavy engines (slider S_P), in tokens; 16 to engine.maxBatchTokens."""
    decode_heavy: Annotated[int, Field(strict=True, ge=0, le=MAX_BATCH_TOKENS)] = 256
    """Chunk size of D-heavy engines (slider S_D), in tokens; 16 to engine.maxBatchTokens, or 0: no prefills there.
    Equal to prefillHeavy it makes roles void."""


class SloClassSpec(ManifestModel):
    """A named pair of objectives that requests may ask for."""

    name: Label
    """Name that requests give in the header x-sluice-slo-class."""
    ttft_milliseconds: Annotated[int, Field(strict=True, ge=1, le=600_000)]
    """Objective for the time to first token, in milliseconds."""
    tpot_milliseconds: Annotated[int, Field(strict=True, ge=1, le=60_000)]
    """Objective for the time per output token, in milliseconds."""
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] = 0
    """Requests of a higher priority go first: a level is worth 10 s of earlier arrival, so that nobody waits for
    ever."""


class SloSpec(ManifestModel):
    """Latency objectives."""

    ttft_milliseconds: Annotated[int, Field(strict=True, ge=1, le=600_000)]
    """Objective for the time to first token, in milliseconds."""
    tpot_milliseconds: Annotated[int, Field(strict=True, ge=1, le=60_000)]
    """Objective for the time per output token, in milliseconds."""
    attainment: Percentage = f"{DEFAULT_ATTAINMENT:.0%}"
    """Share of requests that should meet both objectives, such as 90%."""
    classes: Annotated[tuple[SloClassSpec, ...], Field(max_length=16)] = ()
    """Named objectives besides the default ones."""


class ParametersSpec(ManifestModel):
    """Parameters of the strategies."""

    watermark_percent: Annotated[int, Field(strict=True, ge=50, le=99)] = 95
    """Watermark M: share of KV blocks above which a D-heavy engine degrades its longest outputs."""
    approaching_factor_percent: Annotated[int, Field(strict=True, ge=50, le=100)] = 96
    """Alpha: share of the TPOT objective above which a decode on a P-heavy engine flows back."""
    early_rejection: Annotated[EarlyRejectionName, *DISABLED_IS_OFF] = "Off"
    """What happens to a request that no engine can serve within its TTFT objective.
    Disabled: it goes where it is least late. Random: it goes to any engine. Reject: it is refused, with a time to try
    again. Off is the older name of Disabled."""
    min_tokens_between_moves: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 16
    """Output tokens between two moves of one request, unless its objective is at stake."""
    prefill_batch_tokens: Annotated[int, Field(strict=True, ge=0, le=1_048_576)] = 2048
    """Disaggregated: prompt tokens that saturate a GPU, up to which a P-heavy engine batches whole prompts.
    A longer prompt runs alone. 0: an iteration is filled to engine.maxBatchTokens."""
    batch_token_budget: Annotated[int, Field(strict=True, ge=16, le=1_048_576)] = 4096
    """Prompt tokens that FlowPrefill batches stay below; a single longer prompt still runs."""
    grant_wait_milliseconds: Annotated[int, Field(strict=True, ge=1, le=25_000)] = 10_000
    """Disaggregated: longest time that a finished prefill waits for a D-heavy engine with room, its KV where it is.
    Then it is recomputed and decodes where that is done."""
    tpot_share_percent: Annotated[int, Field(strict=True, ge=50, le=100)] = 98
    """Sluice: share of the TPOT objective that prefills may use up."""
    least_prefill_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 10
    """Sluice: share of the TPOT objective that prompts get in each iteration."""
    late_ttft_factor_percent: Annotated[int, Field(strict=True, ge=100, le=400)] = 300
    """Sluice: late prompts wait as if their TTFT objective were so much longer."""
    late_share_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 10
    """Sluice: share of the prefill time for late prompts while others can be in time."""
    overload_order: Literal["LongestLast", "Deadline"] = "LongestLast"
    """Sluice: who waits in overload. LongestLast: long prompts. Deadline: the last due."""
    pack_share_percent: Annotated[int, Field(strict=True, ge=0, le=100)] = 85
    """Sluice: share of the TPOT objective up to which decodes gather on one engine."""
    credit_milliseconds: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 100
    """Sluice: prefill work that an engine gets ahead; the rest waits at the router. 0: none does."""
    macro_instance_least: Annotated[int, Field(strict=True, ge=1, le=256)] = 4
    """EcoServe: engines of the macro instance that a split makes (N_l)."""
    macro_instance_most: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    """EcoServe: most engines of a macro instance (N_u). Less than twice macroInstanceLeast less 1 counts as that."""
    split_search_steps: Annotated[int, Field(strict=True, ge=1, le=16)] = 6
    """DynaServe: most steps of the search for where a request is split (K)."""
    split_margin_tokens: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 20
    """DynaServe: tokens that an answer is taken to be longer than predicted."""
    tbt_target_milliseconds: Annotated[int, Field(strict=True, ge=0, le=60_000)] = 0
    """DynaServe: how long an iteration with decodes may take, at the 99th percentile.
    0: the least objective for the time per output token among them."""


class Emulation(ManifestModel):
    """Replaces the forward pass by the clock of a latency model."""

    gpu: Label
    """GPU that is emulated, such as h100."""
    model: Text
    """Model whose iterations are emulated."""


class EngineSpec(PodFields):
    """One engine: a vLLM instance in a pod or a local process."""

    image: Text | None = None
    """Container image; the engine image that the operator was installed with when absent."""
    tensor_parallel_size: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """GPUs that share one engine."""
    max_batch_tokens: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)] = 8192
    """Largest chunk size that may be set without a restart, in tokens."""
    max_model_len: Annotated[int, Field(strict=True, ge=16, le=16_777_216)] | None = None
    """Longest prompt + output, in tokens; the model's own limit when absent."""
    extra_args: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Further arguments of vLLM; those that Sluice sets itself are refused."""
    resources: Resources = Resources()
    """Resources of the engine container. Where they name no device, tensorParallelSize GPUs are added."""
    gpu_resource_name: Annotated[str, Field(pattern=OPTIONAL_RESOURCE_NAME, max_length=253)] | None = None
    """Extended resource of the GPUs that are added, such as amd.com/gpu; none are when empty, nor to emulated engines.
    The name that the operator was installed with when absent."""
    startup_timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 1800
    """Longest time from the start of an engine until it serves."""
    drain_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 300
    """Longest time an engine may take to hand its work over before it stops."""
    resume_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = 30
    """How long a stream that its client can resume goes on after its connection or its router was lost."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm."""
    emulation: Emulation | None = None
    """Emulates a GPU instead of computing, for tests without one; generated text is meaningless."""


class RdmaSpec(ManifestModel):
    """How engines reach the RDMA fabric."""

    fabric: Literal["InfiniBand", "RoCE", "EFA"]
    """Kind of fabric: InfiniBand, RoCE or EFA."""
    resource_name: ResourceName | None = None
    """Extended resource of the network device."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate of the network device, instead of resourceName."""
    resource_count: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Devices (or slots of a shared plugin) per engine."""
    networks: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Networks of Multus that engine pods join, as name or namespace/name."""
    net_devices: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Network devices that UCX may use (UCX_NET_DEVICES), such as mlx5_0:1; any when absent."""
    gid_index: Annotated[int, Field(strict=True, ge=0, le=255)] | None = None
    """Index of the GID (UCX_IB_GID_INDEX); for RoCE only."""
    transports: Annotated[tuple[Text, ...], Field(max_length=16)] = ()
    """Transports that UCX may use (UCX_TLS); any when absent. On GPUs they must contain cuda_copy or cuda_ipc."""
    memlock: Literal["Node", "IPCLock"] = "Node"
    """Who lifts the limit of locked memory. Node: the node does (LimitMEMLOCK=infinity). IPCLock: the capability
    IPC_LOCK, which helps containers that run as root only."""
    require_rdma: Annotated[StrictBool, Field(alias="requireRDMA")] = False
    """Refuse to serve over TCP when RDMA cannot be used."""
    pod_annotations: StringMap = Field(default_factory=dict)
    """Annotations of engine pods, for network plugins."""


class IssuerRef(ManifestModel):
    """An issuer of cert-manager."""

    name: ObjectName
    """Name of the issuer."""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """An Issuer of the cluster's namespace, or a ClusterIssuer."""


class TlsSpec(ManifestModel):
    """Encryption, and where certificates come from."""

    mode: Literal["Disabled", "SecretRef", "CertManager"] = "Disabled"
    """Disabled, certificates of a Secret (SecretRef), or of cert-manager (CertManager)."""
    secret_name: ObjectName | None = None
    """Secret with tls.crt, tls.key and ca.crt; required by mode SecretRef, refused otherwise."""
    issuer_ref: Annotated[IssuerRef | None, FieldEffect.LIVE] = None
    """Issuer of the certificates; required by mode CertManager, refused otherwise."""


class RouterTlsSpec(TlsSpec):
    """Encryption of the API, and where certificates come from."""

    dns_names: Annotated[tuple[HostName, ...], FieldEffect.LIVE, Field(max_length=16)] = ()
    """Names of the certificate that cert-manager issues; those of the Service when absent. Needs mode CertManager."""


class NetworkSpec(ManifestModel):
    """How KV moves between engines."""

    mode: Literal["TCP", "RDMA"] = "TCP"
    """Transport of KV between engines. TCP works everywhere, RDMA needs devices and the field rdma."""
    kv_port: Annotated[int, Field(strict=True, ge=1024, le=65_535)] = 5600
    """Port of NIXL's side channel."""
    tcp_port_range: PortRange | None = None
    """Ports of UCX over TCP; any when absent."""
    rdma: RdmaSpec | None = None
    """Required by mode RDMA, refused otherwise."""
    tls: Annotated[TlsSpec, FieldEffect.RESTARTS_ALL] = TlsSpec()
    """Mutual TLS among routers, engines and operator. KV itself is not encrypted."""


class ServiceSpec(ManifestModel):
    """The Service in front of the routers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """ClusterIP is reached within the cluster, NodePort by the nodes, LoadBalancer from outside."""
    port: Port = 8000
    """Port of the OpenAI API; also the local port of `sluice up`."""
    annotations: StringMap = Field(default_factory=dict)
    """Annotations of the Service."""


class ApiKeyAuth(ManifestModel):
    """Keys that clients send as bearer tokens."""

    secret_name: ObjectName
    """Secret whose entries are the keys, each under its owner's name; changes of it are in force without a restart."""


class JwtAuth(ManifestModel):
    """JSON Web Tokens of an OpenID Connect issuer, that clients send as bearer tokens."""

    key_set_url: Annotated[str, Field(pattern=r"^(https://|file:///)[!-~]+$", max_length=1024)]
    """URL of the issuer's key set (JWKS), https or a file of the router's container; read every five minutes."""
    issuer: Text
    """Issuer (iss) that tokens must name."""
    audience: Text
    """Audience (aud) that tokens must be for."""
    owner_claim: Text = "sub"
    """Claim that names the owner."""
    leeway_seconds: Annotated[int, Field(strict=True, ge=0, le=300)] = 30
    """Most by which the issuer's clock and the routers' may differ."""


class OwnerLimitsSpec(ManifestModel):
    """What requests with one owner's keys may take, over all routers together."""

    owner: Annotated[str, Field(pattern=r"^[!-~]+$", max_length=253)]
    """Owner of the keys: the name of their entry in the Secret, or what a token's claim says; * stands for each owner
    that is not named."""
    requests_per_minute: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most requests in any minute."""
    tokens_per_minute: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most tokens, of prompts and outputs, of the requests of any minute. A request counts with prompt and max_tokens
    until it has ended."""
    concurrent_requests: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most requests at a time."""
    max_output_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_LIMIT)] | None = None
    """Most output tokens of a request; also those of a request that does not say."""
    classes: Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(max_length=17)] = ()
    """Classes of slo.classes that requests may use, an empty name for the default objectives; all when absent. Their
    highest priority is the highest that a request may ask for."""
    weight: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """Share of the tokens that this owner gets while requests of several owners wait."""


class AuthSpec(ManifestModel):
    """Who may use the API."""

    mode: Literal["None", "APIKey", "JWT", "APIKeyOrJWT"] = "None"
    """None serves everybody who reaches the port; APIKey requires a key, JWT a token, APIKeyOrJWT one of the two."""
    api_key: ApiKeyAuth | None = None
    """Required by the modes with APIKey, refused otherwise."""
    jwt: JwtAuth | None = None
    """Required by the modes with JWT, refused otherwise."""
    limits: Annotated[tuple[OwnerLimitsSpec, ...], FieldEffect.LIVE, Field(max_length=256)] = ()
    """Limits of the keys' owners; owners without any are not limited. In force without a restart."""


class CorsSpec(ManifestModel):
    """Web pages that may call the API from a browser."""

    allowed_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^([*]|https?://[^/, ]+)$", max_length=253)], ...], Field(max_length=32)
    ] = ()
    """Their origins, such as https://chat.example.com; * for all. None may when absent."""


class RouterSpec(PodFields):
    """The routers."""

    replicas: Annotated[int, FieldEffect.LIVE, Field(strict=True, ge=1, le=64)] = 2
    """Number of routers. In force without a restart."""
    image: Text | None = None
    """Container image; the router image that the operator was installed with when absent."""
    resources: Resources = Resources()
    """Resources of the router container; requests 200m of cpu where requests and limits name no cpu."""
    drain_timeout_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 300
    """Longest time that answers under way may take to end when a router stops."""
    service: ServiceSpec = ServiceSpec()
    """The Service in front of them."""
    auth: AuthSpec = AuthSpec()
    """Who may use the API."""
    cors: CorsSpec = CorsSpec()
    """Web pages that may call the API from a browser."""
    tls: RouterTlsSpec = RouterTlsSpec()
    """Encryption of the API. A Secret for it needs no ca.crt."""


class RolloutGateSpec(ManifestModel):
    """What routers must measure of each batch of new engines before the next one is replaced."""

    duration_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 120
    """How long a batch is measured, from when its engines serve."""
    min_attainment: Percentage = "90%"
    """Least share of requests that meet both objectives, such as 90%; set it below what is measured before the roll."""
    max_error_rate: ErrorRate = "5%"
    """Greatest share of requests that fail, such as 5%; above it, the roll goes back at once."""
    min_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 20
    """Requests without which there is no verdict: of the new engines, or else of all."""
    timeout_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 1800
    """Longest wait for so many requests. Then the roll goes on, and the status says that nothing was measured; where no
    router reports, it goes back."""


class RolloutSpec(ManifestModel):
    """How engines are replaced when a field that restarts them changes. `sluice up` replaces one at a time."""

    max_unavailable: CountOrPercentage = 1
    """Engines that may be away at once, as a count or a share of replicas, rounded down; at least 1 where shares leave
    no engine to replace."""
    max_surge: CountOrPercentage = 0
    """Engines beyond replicas that may run meanwhile, as a count or a share of replicas, rounded up. They need spare
    GPUs. With 0, a cluster of one engine does not serve while it is replaced."""
    paused: StrictBool = False
    """Stops between two engines: no further one is replaced until it is false again."""
    gate: RolloutGateSpec | None = None
    """Stops the roll, and goes back to the engines that served before, where the new ones are worse. Nothing is
    measured when absent."""


class CountBounds(ManifestModel):
    """Least and most."""

    min: CountOrPercentage
    """Least value."""
    max: CountOrPercentage
    """Most value."""


class TokenBounds(ManifestModel):
    """Least and most, in tokens."""

    min: Annotated[int, Field(strict=True, ge=0, le=MAX_BATCH_TOKENS)]
    """Least value."""
    max: Annotated[int, Field(strict=True, ge=16, le=MAX_BATCH_TOKENS)]
    """Most value."""


class ReplicaBounds(ManifestModel):
    """Least and most engines."""

    min: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """Least value."""
    max: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """Most value."""


class ChunkSizeBounds(ManifestModel):
    """Bounds of the chunk sizes."""

    prefill_heavy: TokenBounds | None = None
    """Bounds of chunkSizes.prefillHeavy."""
    decode_heavy: TokenBounds | None = None
    """Bounds of chunkSizes.decodeHeavy."""


class AutotuneBounds(ManifestModel):
    """How far the tuner may go; Apply does not touch a slider without bounds."""

    prefill_heavy: CountBounds | None = None
    """Bounds of prefillHeavy."""
    chunk_sizes: ChunkSizeBounds = ChunkSizeBounds()
    """Bounds of the chunk sizes."""
    replicas: ReplicaBounds | None = None
    """Bounds of replicas, for `sluice plan --rate`; the tuner itself does not change replicas."""


class AutotuneSpec(ManifestModel):
    """The search for better sliders."""

    mode: Annotated[AutotuneMode, *DISABLED_IS_OFF] = "Off"
    """Disabled; Recommend writes what it finds to the status; Apply also applies it, within the bounds.
    Off is the older name of Disabled."""
    bounds: AutotuneBounds = AutotuneBounds()
    """Bounds of the search."""
    cooldown_seconds: Annotated[int, Field(strict=True, ge=1, le=86_400)] = 300
    """Shortest time between two changes; each further change within 24 times as long doubles it."""


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
    strategy: Annotated[StrategyName, FieldEffect.LIVE] = "TaiChi"
    """How the sliders are used; in force without a restart. TaiChi uses them as given.
    Aggregated gives every engine chunkSizes.prefillHeavy and decodes in place.
    Sluice gives every engine engine.maxBatchTokens and sizes each iteration by what decodes can spare.
    EcoServe gives every engine engine.maxBatchTokens for iterations of prefills, in which decodes wait.
    DynaServe gives every engine engine.maxBatchTokens, sizes each iteration by its target for the time between tokens,
    and splits an answer between two engines where that balances them.
    Disaggregated gives P-heavy engines engine.maxBatchTokens and D-heavy engines no prefills;
    docs/internals/strategies.md says how it follows DistServe. FlowPrefill uses them as given;
    the prompt whose TTFT objective ends first preempts others where an iteration ends, so smaller chunk sizes
    let it in sooner.
    Auto lets the search of autotune choose the strategy with its sliders; in mode Apply it changes live.
    Until a search has chosen, and outside mode Apply, Auto is TaiChi; the condition Autotuned says which it is."""
    parameters: Annotated[ParametersSpec, FieldEffect.LIVE] = ParametersSpec()
    """Parameters of the strategies. In force without a restart."""
    model: Annotated[ModelSpec, FieldEffect.RESTARTS_ALL]
    """The model, mounted read-only at /model in engines and routers. Once it has served, another one is refused."""
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
