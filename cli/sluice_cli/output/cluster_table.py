"""Shows a cluster's status: the table of engines, and a command line to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from sluice_cli.local_cluster.cluster_status import AutotuneSummary, ClassAttainment, ClusterStatus, RouterStatusRow

STATE_STYLES = {"ready": "green", "draining": "yellow", "drained": "yellow", "lost": "red", "refused": "red"}


def print_cluster_status(console: Console, status: ClusterStatus) -> None:
    """Prints the table, and a command line to try when the cluster serves."""
    console.print(make_cluster_table(status))
    if status.is_ready:
        console.print(f"try: {make_curl_line(status)}", markup=False, soft_wrap=True)


def make_cluster_table(status: ClusterStatus) -> Table:
    """Makes the table of engines, with the routers above and the attainment below it."""
    title = f"{status.name}: {status.phase}   {'   '.join(map(_describe_router, status.routers))}"
    table = Table(title=title, title_justify="left", caption=_describe_service(status) or None)
    table.caption_justify = "left"
    for name in ("engine", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("chunk", "running", "waiting", "KV free/used/total", "moves in/out", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in status.engines:
        style = STATE_STYLES.get(engine.state, "dim")
        kv = f"{engine.kv_blocks_free}/{engine.kv_blocks_used}/{engine.kv_blocks_total}"
        table.add_row(
            engine.engine_id,
            engine.role,
            f"[{style}]{engine.state}[/]",
            _or_dash(engine.chunk_size_tokens),
            _or_dash(engine.running_decodes),
            _or_dash(engine.waiting_requests),
            "-" if engine.kv_blocks_total is None else kv,
            "-" if engine.num_moved_in is None else f"{engine.num_moved_in}/{engine.num_moved_out}",
            str(engine.num_restarts),
        )
    return table


def _describe_router(router: RouterStatusRow) -> str:
    readiness = "ready" if router.is_ready else "not ready"
    return f"{router.name} {router.url} ({readiness}, plan {router.generation}, {router.num_requests} requests)"


def _describe_service(status: ClusterStatus) -> str:
    """Says how well the requests were served, and what the gate of a roll and the tuner make of it."""
    attained = "   ".join(
        f"{counters.name}: {counters.num_finished} finished, TTFT {_share(counters.num_met_ttft, counters)},"
        f" TPOT {_share(counters.num_met_tpot, counters)}, both {_share(counters.num_met_both, counters)}"
        for counters in status.classes
        if counters.num_finished
    )
    tuning = _describe_tuning(status.autotune) if status.autotune else ""
    refused = [f"{engine.engine_id}: {engine.last_fault}" for engine in status.engines if engine.state == "refused"]
    return "\n".join(filter(None, (*refused, status.rollout, attained, tuning)))


def _describe_tuning(tuning: AutotuneSummary) -> str:
    line = f"autotune: {tuning.reason}: {tuning.message}"
    if tuning.prefill_heavy is None:
        return line
    strategy = f"{tuning.strategy}, " if tuning.strategy else ""
    return (
        f"{line}\nrecommended: {strategy}prefillHeavy {tuning.prefill_heavy}, chunks"
        f" {tuning.prefill_heavy_tokens}/{tuning.decode_heavy_tokens}, predicted attainment"
        f" {100 * (tuning.predicted_attainment or 0.0):.0f} %"
    )


def make_curl_line(status: ClusterStatus) -> str:
    """Makes a command line that sends a first request."""
    body = '{"model": "%s", "stream": true, "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}'
    options = "-N"
    if status.routers and status.routers[0].front_tls:
        options += f" --cacert {status.routers[0].front_tls}/tls.crt"
    if status.routers and status.routers[0].needs_key:
        options += ' -H "Authorization: Bearer $SLUICE_API_KEY"'
    url = f"{status.url}/v1/chat/completions"
    return f"curl {options} {url} -H 'Content-Type: application/json' -d '{body % status.model}'"


def _share(num_met: int, counters: ClassAttainment) -> str:
    return f"{100 * num_met / counters.num_finished:.0f} %"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
