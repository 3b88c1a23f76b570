"""The command line of an engine, checked before anything heavy is imported.

Every option has an environment variable as its fallback (``--engine-id`` is ``SLUICE_ENGINE_ID``), which a pod's
downward API can fill. Arguments after ``--`` go to vLLM, but may not set options that this program owns.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sluice_core.latency.transfer import TRANSFER_LATENCY_S
from sluice_engine.errors import SettingsError
from sluice_engine.resume_timeouts import LEASE_S, RESUME_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENVIRONMENT_PREFIX = "SLUICE_"

Port = Annotated[int, Field(ge=1, le=65535)]

# vLLM options that this program sets itself; each has an option of ours, or no meaning here.
OWNED_VLLM_OPTIONS = frozenset(
    {
        "--additional-config",
        "--async-scheduling",
        "--block-size",
        "--data-parallel-size",
        "--disable-hybrid-kv-cache-manager",
        "--distributed-executor-backend",
        "--dtype",
        "--kv-cache-memory-bytes",
        "--kv-events-config",
        "--kv-transfer-config",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--model",
        "--no-async-scheduling",
        "--no-enable-chunked-prefill",
        "--pipeline-parallel-size",
        "--prefix-caching-hash-algo",
        "--revision",
        "--scheduler-cls",
        "--scheduling-policy",
        "--speculative-config",
        "--tensor-parallel-size",
    }
)


class EmulationSettings(BaseModel):
    """What is emulated: a known GPU and model, explicit coefficients, or the first with some of the second.

    Args:
        gpu: Name of a profile's GPU, such as ``h100-80g``; ``a100-80gx2`` for two that share an engine.
        model: Name of the profile's model, such as ``qwen2.5-14b``, or the path of its config.json.
        base_s: Cost of an iteration that computes anything, in seconds.
        token_s: Cost per token, prefill and decode alike, in seconds.
        attention_s: Cost per unit of prefill attention work (``c * (context + c / 2)``), in seconds.
        chunk_s: Cost per prefill chunk, in seconds.
        decode_s: Cost per decode, in seconds, beyond its token.
        context_s: Cost per token of decode context, in seconds.
        kv_bytes: Bytes of KV cache.
        kv_bytes_per_token: Bytes that one token's KV takes on the link; the served model's own when absent.
        link_bytes_per_s: Bandwidth of KV transfers.
        link_latency_s: Latency of a KV transfer, in seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str | None = None
    model: str | None = None
    base_s: Annotated[float, Field(ge=0)] | None = None
    token_s: Annotated[float, Field(ge=0)] | None = None
    attention_s: Annotated[float, Field(ge=0)] | None = None
    chunk_s: Annotated[float, Field(ge=0)] | None = None
    decode_s: Annotated[float, Field(ge=0)] | None = None
    context_s: Annotated[float, Field(ge=0)] | None = None
    kv_bytes: Annotated[int, Field(ge=1)] | None = None
    kv_bytes_per_token: Annotated[int, Field(ge=1)] | None = None
    link_bytes_per_s: Annotated[float, Field(gt=0)] = 20e9
    link_latency_s: Annotated[float, Field(ge=0)] = TRANSFER_LATENCY_S


class EngineSettings(BaseModel):
    """One engine.

    Args:
        engine_id: Pod uid, or the launcher's name.
        host: Address of the gRPC server.
        port: Its port.
        metrics_port: Port of /metrics, /livez and /readyz.
        kv_host: Address at which other engines reach this one's KV side channel.
        kv_port: Its port; below the ephemeral range, or a foreign connection may hold it.
        model: Directory of the model, or its name on the hub.
        revision: Revision of it.
        model_id: The control plane's id of the model, for routers; empty: any router may use the engine.
        dtype: Type of weights and KV; float32 on the CPU and the model's own elsewhere when absent.
        max_batch_tokens: Largest chunk size that may ever be set, in tokens.
        max_model_len: Longest prompt + output, in tokens; the model's own when absent.
        max_num_seqs: Most running requests.
        tensor_parallel_size: GPUs of this engine.
        block_size: Tokens per KV block; 32 on the CPU and vLLM's own elsewhere when absent.
        kv_cache_bytes: Bytes of KV cache; vLLM measures what is left on a GPU when absent, and 64 MiB on the CPU.
        drain_timeout_s: Longest drain after SIGTERM, in seconds.
        start_timeout_s: Longest start of the EngineCore, in seconds.
        lease_s: Time for which the requests of a lost stream run on, in seconds.
        resume_timeout_s: The same for answers that clients can resume at another router, in seconds.
        kv_backend: NIXL's backend; LIBFABRIC for EFA.
        require_rdma: Refuse to serve where KV would go over TCP.
        kv_poll_us: Pause of NIXL's progress thread, in microseconds; 0, with RDMA, polls without a pause.
        peer_tls: Folder with tls.crt, tls.key and ca.crt of the gRPC server; not encrypted when absent.
        router_name: DNS name that certificates of routers must be for; required by the former.
        emulation: Emulates a GPU instead of computing.
        vllm_args: Further arguments of vLLM.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
    host: str = "0.0.0.0"
    port: Port
    metrics_port: Port
    kv_host: str
    kv_port: Port
    model: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    model_id: str = ""
    dtype: str | None = None
    max_batch_tokens: Annotated[int, Field(ge=1)]
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    block_size: Annotated[int, Field(ge=1)] | None = None
    kv_cache_bytes: Annotated[int, Field(ge=1)] | None = None
    drain_timeout_s: Annotated[float, Field(ge=0)] = 300.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    lease_s: Annotated[float, Field(ge=0)] = LEASE_S
    resume_timeout_s: Annotated[float, Field(ge=0)] = RESUME_TIMEOUT_S
    kv_backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    require_rdma: bool = False
    kv_poll_us: Annotated[int, Field(ge=0)] = 100
    peer_tls: str | None = None
    router_name: str | None = None
    emulation: EmulationSettings | None = None
    vllm_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _name_peers(self) -> Self:
        if (self.peer_tls is None) != (self.router_name is None):
            raise ValueError("--peer-tls and --router-name need each other")
        return self

    @field_validator("vllm_args")
    @classmethod
    def refuse_owned(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        """Refuses vLLM arguments that this program sets itself."""
        for argument in arguments:
            name = argument.split("=", 1)[0].replace("_", "-")
            if name in OWNED_VLLM_OPTIONS:
                raise ValueError(f"{name} is set by the engine itself and cannot be given after --")
        return arguments


# Help of each option, in the order in which --help shows them.
OPTIONS = {
    "engine_id": "pod uid, or the launcher's name of this engine",
    "host": "address of the gRPC server (default: all)",
    "port": "port of the gRPC server",
    "metrics_port": "port of /metrics, /livez and /readyz",
    "kv_host": "address at which other engines reach this one's KV",
    "kv_port": "its port, below 32768",
    "model": "directory of the model, or its name on the hub",
    "revision": "revision of the model",
    "model_id": "the control plane's id of the model; routers of another one do not use this engine",
    "dtype": "type of weights and KV",
    "max_batch_tokens": "largest chunk size that may be set live, in tokens",
    "max_model_len": "longest prompt + output, in tokens",
    "max_num_seqs": "most running requests",
    "tensor_parallel_size": "GPUs of this engine",
    "block_size": "tokens per KV block",
    "kv_cache_bytes": "bytes of KV cache",
    "drain_timeout_s": "longest drain after SIGTERM, in seconds",
    "start_timeout_s": "longest start, in seconds",
    "lease_s": "time for which requests of a lost stream go on, in seconds",
    "resume_timeout_s": "time for which answers that clients can resume at another router are kept, in seconds",
    "kv_backend": "NIXL's backend: UCX, or LIBFABRIC for EFA",
    "require_rdma": "true: refuse to serve where KV would go over TCP",
    "kv_poll_us": "pause of NIXL's progress thread, in microseconds; 0 with RDMA",
    "peer_tls": "folder with tls.crt, tls.key and ca.crt of the gRPC server",
    "router_name": "DNS name that certificates of routers must be for, with --peer-tls",
    "emulation": "JSON of what to emulate instead of computing",
}


class _Parser(argparse.ArgumentParser):
    """One whose errors are ours, so that a pod's status and the launcher show them."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line; values stay strings, the settings check them."""
    parser = _Parser(
        prog="python -m sluice_engine",
        description="A vLLM engine that serves routers over gRPC. Arguments after -- go to vLLM.",
    )
    for name, text in OPTIONS.items():
        option = name.replace("_", "-")
        parser.add_argument(f"--{option}", metavar=name.upper(), help=f"{text} [{ENVIRONMENT_PREFIX}{name.upper()}]")
    return parser


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> EngineSettings:
    """Reads the command line, then the environment for what it leaves out.

    Args:
        arguments: Command line without the program's name.
        environment: Environment; this process's own when absent.

    Raises:
        SettingsError: Names the option, the value and the limit.
    """
    environment = os.environ if environment is None else environment
    own, vllm = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, vllm = own[:cut], own[cut + 1 :]
    values: dict[str, object] = {}
    for name, given in vars(make_parser().parse_args(own)).items():
        value = given if given is not None else environment.get(ENVIRONMENT_PREFIX + name.upper())
        if value:
            values[name] = value
    try:
        if "emulation" in values:
            values["emulation"] = EmulationSettings.model_validate_json(str(values["emulation"]))
        return EngineSettings.model_validate({**values, "vllm_args": tuple(vllm)})
    except ValidationError as error:
        raise SettingsError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """One line per wrong option: its name, what is wrong, the value."""
    lines = []
    for item in error.errors():
        name = "--" + ".".join(str(part) for part in item["loc"]).replace("_", "-")
        value = "" if item["type"] == "missing" else f" (got {item['input']!r})"
        lines.append(f"{name}: {item['msg']}{value}")
    return "; ".join(lines)
