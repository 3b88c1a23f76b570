"""The status of a local cluster: one record, made from what its launcher and its routers report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice.v1 import control_pb2, plan_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sluice_cli.local_cluster.cluster_directory import ProcessRecord

ROLE_NAMES = {plan_pb2.ROLE_PREFILL_HEAVY: "P-heavy", plan_pb2.ROLE_DECODE_HEAVY: "D-heavy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatusRow:
    """One engine. Figures are those of the router that reported last; None where no router knows them.

    Args:
        engine_id: The launcher's name.
        role: ``P-heavy``, ``D-heavy`` or empty.
        state: ``starting``, ``restarting``, ``stopping``, ``ready``, ``draining``, ``drained``, ``lost``, ``refused``.
        chunk_size_tokens: In force (acknowledged).
        running_decodes: Decodes that run.
        waiting_requests: Requests that wait for prefill.
        kv_blocks_free: Neither used nor granted.
        kv_blocks_used: In use, pinned ones included.
        kv_blocks_granted: Reserved by grants.
        kv_blocks_pinned: Kept for a reader.
        kv_blocks_total: All.
        num_moved_in: Requests moved in since its start.
        num_moved_out: Requests moved out since its start.
        num_restarts: Starts after the first.
        pid: Process id.
        transport: KV transport in use.
        last_fault: For people.
    """

    engine_id: str
    role: str = ""
    state: str = "starting"
    chunk_size_tokens: int | None = None
    running_decodes: int | None = None
    waiting_requests: int | None = None
    kv_blocks_free: int | None = None
    kv_blocks_used: int | None = None
    kv_blocks_granted: int | None = None
    kv_blocks_pinned: int | None = None
    kv_blocks_total: int | None = None
    num_moved_in: int | None = None
    num_moved_out: int | None = None
    num_restarts: int = 0
    pid: int | None = None
    transport: str = ""
    last_fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatusRow:
    """One router.

    Args:
        name: The launcher's name.
        url: Of its OpenAI API.
        metrics_url: Of its own probes, metrics and explanations: workers of a replica share the API's.
        front_tls: Folder of its certificate; empty: nothing is encrypted.
        needs_key: Requests must carry a key.
        is_ready: /readyz answers 200.
        generation: Plan in force.
        acknowledged_generation: Plan that every engine acknowledged.
        num_requests: Requests in it.
        num_waiting: Requests that wait for an engine.
        num_restarts: Starts after the first.
        pid: Process id.
    """

    name: str
    url: str
    metrics_url: str
    front_tls: str = ""
    needs_key: bool = False
    is_ready: bool = False
    generation: int = 0
    acknowledged_generation: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAttainment:
    """Requests of one SLO class since the routers' start.

    Args:
        name: Class; ``default`` for the default one.
        num_finished: Finished, failed and rejected ones included.
        num_met_ttft: Of these, met TTFT.
        num_met_tpot: Of these, met TPOT.
        num_met_both: Of these, met both.
    """

    name: str
    num_finished: int
    num_met_ttft: int
    num_met_tpot: int
    num_met_both: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneSummary:
    """What the tuner decided last.

    Args:
        reason: Reason of the condition Autotuned, as on Kubernetes.
        message: The same for people.
        strategy: The strategy that it recommends, where the manifest leaves that to it; empty: nothing.
        prefill_heavy: P-heavy engines that it recommends; None: it recommends nothing yet.
        prefill_heavy_tokens: Their chunk size.
        decode_heavy_tokens: Chunk size of the others.
        predicted_attainment: Share of requests that would meet their objectives then.
    """

    reason: str
    message: str
    strategy: str = ""
    prefill_heavy: int | None = None
    prefill_heavy_tokens: int | None = None
    decode_heavy_tokens: int | None = None
    predicted_attainment: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """A cluster at one moment."""

    name: str
    phase: str
    manifest: str
    model: str
    routers: tuple[RouterStatusRow, ...]
    engines: tuple[EngineStatusRow, ...]
    classes: tuple[ClassAttainment, ...]
    autotune: AutotuneSummary | None = None
    rollout: str = ""

    @property
    def is_ready(self) -> bool:
        """True when every router and every engine serves, with a role of the plan in force."""
        has_all = bool(self.routers) and bool(self.engines)
        are_engines_ready = all(engine.state == "ready" and engine.role for engine in self.engines)
        return has_all and are_engines_ready and all(router.is_ready for router in self.routers)

    @property
    def url(self) -> str:
        """OpenAI API of the first router."""
        return self.routers[0].url if self.routers else ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {**asdict(self), "is_ready": self.is_ready, "url": self.url}


def make_cluster_status(
    *,
    name: str,
    phase: str,
    manifest: str,
    model: str,
    processes: Sequence[ProcessRecord],
    statuses: dict[str, control_pb2.GetStatusResponse | None],
    autotune: AutotuneSummary | None = None,
    rollout: str = "",
) -> ClusterStatus:
    """Puts together what the launcher and the routers know.

    Args:
        name: The cluster.
        phase: What the launcher is doing.
        manifest: Path of the manifest.
        model: Name that clients use for the model.
        processes: Engines and routers.
        statuses: Answer of each router, by name; None where it does not answer.
        autotune: What the tuner says; None: it is off.
        rollout: What the gate says of a roll; empty: there is none.
    """
    answers = [status for status in statuses.values() if status]
    return ClusterStatus(
        name=name,
        phase=phase,
        manifest=manifest,
        model=model,
        routers=tuple(_view_router(p, statuses.get(p.name)) for p in processes if p.kind == "router"),
        engines=tuple(
            _view_engine(p, pick_engine_status(answers, p.name), phase) for p in processes if p.kind == "engine"
        ),
        classes=_sum_classes(answers),
        autotune=autotune,
        rollout=rollout,
    )


def pick_engine_status(
    statuses: Sequence[control_pb2.GetStatusResponse], engine_id: str
) -> control_pb2.EngineStatus | None:
    """Picks an engine's status: of several routers' reports, one with a live link."""
    views = [engine for status in statuses for engine in status.engines if engine.engine_id == engine_id]
    live = (control_pb2.ENGINE_STATE_DRAINING, control_pb2.ENGINE_STATE_DRAINED, control_pb2.ENGINE_STATE_READY)
    return max(views, key=lambda view: live.index(view.state) if view.state in live else -1, default=None)


def name_state(state: control_pb2.EngineState.ValueType) -> str:
    """The name of an engine's state, for people."""
    return control_pb2.EngineState.Name(state).removeprefix("ENGINE_STATE_").lower()


def _view_engine(process: ProcessRecord, status: control_pb2.EngineStatus | None, phase: str) -> EngineStatusRow:
    if status is None or process.pid is None:
        state = "restarting" if process.pid is None and process.num_starts else "starting"
        state = "refused" if process.refusal else state
        state = "stopping" if phase == "stopping" else state
        return EngineStatusRow(
            engine_id=process.name,
            state=state,
            num_restarts=_count_restarts(process),
            pid=process.pid,
            last_fault=process.refusal,
        )
    row = EngineStatusRow(
        engine_id=process.name,
        role=ROLE_NAMES.get(status.role, ""),
        state="starting" if status.state == control_pb2.ENGINE_STATE_CONNECTING else name_state(status.state),
        chunk_size_tokens=status.chunk_size_tokens,
        num_restarts=_count_restarts(process),
        pid=process.pid,
        transport=status.transport,
        last_fault=status.last_fault,
    )
    if not status.kv_blocks_total:
        return row  # no engine is without blocks: this one has not reported its load yet
    return replace(
        row,
        running_decodes=status.running_decodes,
        waiting_requests=status.waiting_requests,
        kv_blocks_free=max(0, status.kv_blocks_total - status.kv_blocks_used - status.kv_blocks_granted),
        kv_blocks_used=status.kv_blocks_used,
        kv_blocks_granted=status.kv_blocks_granted,
        kv_blocks_pinned=status.kv_blocks_pinned,
        kv_blocks_total=status.kv_blocks_total,
        num_moved_in=status.num_moved_in,
        num_moved_out=status.num_moved_out,
    )


def _view_router(process: ProcessRecord, status: control_pb2.GetStatusResponse | None) -> RouterStatusRow:
    router = RouterStatusRow(
        name=process.name,
        url=f"{'https' if process.front_tls else 'http'}://127.0.0.1:{process.ports['http']}",
        metrics_url=f"http://127.0.0.1:{process.ports['metrics']}",
        front_tls=process.front_tls,
        needs_key=process.needs_key,
        num_restarts=_count_restarts(process),
        pid=process.pid,
    )
    if status is None:
        return router
    return replace(
        router,
        is_ready=status.is_ready,
        generation=status.generation,
        acknowledged_generation=status.acknowledged_generation,
        num_requests=status.num_requests,
        num_waiting=status.num_waiting,
    )


def _count_restarts(process: ProcessRecord) -> int:
    return max(0, process.num_starts - 1)


def _sum_classes(statuses: Sequence[control_pb2.GetStatusResponse]) -> tuple[ClassAttainment, ...]:
    names = dict.fromkeys(counters.name for status in statuses for counters in status.classes)
    views = []
    for name in names:
        parts = [counters for status in statuses for counters in status.classes if counters.name == name]
        views.append(
            ClassAttainment(
                name=name or "default",
                num_finished=sum(part.num_finished for part in parts),
                num_met_ttft=sum(part.num_met_ttft for part in parts),
                num_met_tpot=sum(part.num_met_tpot for part in parts),
                num_met_both=sum(part.num_met_both for part in parts),
            )
        )
    return tuple(views)
