"""The commands: what they print, and how they refuse."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import click
import pytest
from aiohttp import web
from click.testing import CliRunner
from rich.console import Console
from worker_ports import CLUSTER_PORTS, NAMED_PORTS

from sluice.v1 import control_pb2, plan_pb2
from sluice_cli.demo.openai_client import CompletionStream
from sluice_cli.local_cluster import decision_log_client
from sluice_cli.local_cluster.cluster_directory import ClusterDirectory, ProcessRecord, read_start_time
from sluice_cli.local_cluster.cluster_status import (
    RouterStatusRow,
    make_cluster_status,
)
from sluice_cli.local_cluster.decision_log_client import UnknownRequestError, fetch_decision_log
from sluice_cli.local_cluster.manifest_watch import follow_manifest
from sluice_cli.main import COMMANDS, cli
from sluice_cli.output.cluster_table import make_cluster_table, make_curl_line
from sluice_cli.output.explain_view import MEANINGS, render_decision_log
from sluice_core import scheduling
from sluice_operator.api.manifest import parse_manifest

if TYPE_CHECKING:
    from sluice_operator.api.serving_cluster import ServingCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-cpu.yaml"
SECURED = EXAMPLE.with_name("tiny-secured.yaml")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run commands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.output


def test_the_help_lists_each_command_with_the_first_line_of_its_own_help() -> None:
    context = click.Context(cli)
    assert run("--help")[0] == 0
    for name, summary in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").splitlines()[0] == summary
        assert summary.split()[0] in run("--help")[1]
    assert "No such command 'x'" in run("x")[1]


def test_the_reference_page_has_every_option_with_its_default_and_variable() -> None:
    page = EXAMPLE.parents[1] / "docs" / "reference" / "cli.md"
    written = runpy.run_path(str(page.parents[1] / "cli_reference.py"))["write_reference"]()
    assert written.splitlines() == page.read_text().splitlines(), "run `make reference`"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("sluice_cli.main", {"grpc", "pydantic", "rich", "aiohttp", "psutil"}),
        ("sluice_cli.commands.status", {"aiohttp", "watchfiles", "matplotlib", "sluice_core.sim"}),
        ("sluice_cli.commands.plan", {"grpc", "matplotlib", "jinja2"}),
    ],
)
def test_commands_import_only_what_they_need(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({heavy!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_up_without_the_model_says_where_it_belongs(home: Path) -> None:
    code, output = run("up", str(EXAMPLE))
    assert code == 1
    assert f"spec.model.source: {home}/.sluice/volumes/models/tiny is not a directory; put the model there" in output


def test_up_without_secrets_says_where_they_belong(home: Path) -> None:
    (home / ".sluice/volumes/models/tiny").mkdir(parents=True)
    code, output = run("up", str(SECURED))
    assert code == 1
    secrets = f"{home}/.sluice/secrets"
    assert f"apiKey.secretName: {secrets}/secured-keys is not a directory; put the keys there" in output
    assert f"spec.router.tls.secretName: {secrets}/secured-front: tls.crt cannot be read" in output
    assert f"spec.network.tls.secretName: {secrets}/secured-peers: tls.crt cannot be read" in output


async def test_a_decision_log_is_fetched_from_the_very_process_with_a_key() -> None:
    log = {"request_id": "r", "events": []}

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer sk-1":
            return web.Response(status=401)
        return web.json_response(log)

    application = web.Application()

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": "unknown"}, status=404)

    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"request_id": request.match_info["request_id"]})

    application.router.add_get("/debug/requests/r", answer)
    application.router.add_get("/debug/requests/x", refuse)
    application.router.add_get("/debug/requests/{request_id}", echo)
    application.router.add_get("/version", refuse)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    # The API's port may be shared: another worker would answer there.
    router = RouterStatusRow(name="router-0", url="http://127.0.0.1:1", metrics_url=url, needs_key=True)
    try:
        assert await fetch_decision_log([router], "r", "sk-1") == log
        for request_id in ("a?b", "../../version", "a%2Fb", "a/b", "a#b"):
            assert await fetch_decision_log([router], request_id, "sk-1") == {"request_id": request_id}
        with pytest.raises(UnknownRequestError, match="no router knows request 'x'"):
            await fetch_decision_log([router], "x", "sk-1")
        with pytest.raises(UnknownRequestError, match="asks for a valid API key"):
            await fetch_decision_log([router], "r")
    finally:
        await runner.cleanup()


async def test_a_router_that_does_not_answer_in_time_does_not_know_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log_client, "TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        router = RouterStatusRow(name="router-0", url="http://127.0.0.1:1", metrics_url=url)
        with pytest.raises(UnknownRequestError, match="routers asked: router-0"):
            await fetch_decision_log([router], "r")


def test_the_line_to_try_carries_what_the_router_asks_for() -> None:
    record = ProcessRecord(
        name="router-0", kind="router", pid=1, ports={"http": 8443, "metrics": 8003}, front_tls="/tls", needs_key=True
    )
    view = make_cluster_status(name="n", phase="ready", manifest="m", model="tiny", processes=[record], statuses={})
    line = make_curl_line(view)
    assert line.startswith(
        'curl -N --cacert /tls/tls.crt -H "Authorization: Bearer $SLUICE_API_KEY" https://127.0.0.1:8443/'
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: 4", "replicas: 0", "spec.replicas: 0 is below the least allowed value, 1; use 1 or more"),
        ("persistentVolumeClaim: #", "image: {reference: x}\n      other: #", "spec.model.source.other"),
        ("network:", "network:", ""),
    ],
    ids=["bound", "unknown", "valid"],
)
def test_up_refuses_a_wrong_manifest_by_field(home: Path, old: str, new: str, message: str) -> None:
    (home / "m.yaml").write_text(EXAMPLE.read_text().replace(old, new))
    code, output = run("up", "m.yaml")
    assert code == 1
    assert message in output


def test_up_names_a_taken_port_and_the_ways_out(home: Path) -> None:
    (home / ".sluice/volumes/models/tiny").mkdir(parents=True)
    port, first, last = NAMED_PORTS[50], CLUSTER_PORTS[0], CLUSTER_PORTS[-1]
    with socket.create_server(("127.0.0.1", port)):
        code, output = run("up", str(EXAMPLE), "--http-port", str(port), "--port-range", f"{first}-{last}")
    assert code == 1
    assert f"port {port} (--http-port) is in use on 127.0.0.1" in output
    assert "choose another, or stop what uses it" in output


@pytest.mark.parametrize("arguments", [("--port-range", "9-5"), ("--volume", "x"), ("--http-port", "80")])
def test_options_are_checked(home: Path, arguments: tuple[str, str]) -> None:
    code, output = run("up", str(EXAMPLE), *arguments)
    assert code == 2
    assert arguments[1] in output


def test_without_a_cluster_status_says_so_and_down_has_nothing_to_do(home: Path) -> None:
    code, output = run("status")
    assert (code, "running in" in output) == (1, True)
    assert run("down") == (0, "nothing runs\n")
    assert "no cluster 'x'" in run("status", "--cluster", "x")[1]


def test_status_as_json_works_while_no_router_answers(home: Path) -> None:
    directory = ClusterDirectory("test")
    directory.lock()
    directory.write_launcher("starting", manifest="m.yaml", model="tiny")
    ports = dict(zip(("http", "grpc", "control", "metrics"), NAMED_PORTS[60:64], strict=True))
    started = read_start_time(os.getpid())
    directory.write_processes(
        [
            ProcessRecord(name="router-0", kind="router", pid=os.getpid(), started=started, num_starts=1, ports=ports),
            ProcessRecord(name="engine-0", kind="engine", pid=None, num_starts=2),
        ]
    )
    code, output = run("status", "--json")
    content = json.loads(output)
    assert code == 0
    assert (content["name"], content["phase"], content["is_ready"]) == ("test", "starting", False)
    assert (content["engines"][0]["state"], content["engines"][0]["num_restarts"]) == ("restarting", 1)


def status(state: control_pb2.EngineState.ValueType, used: int) -> control_pb2.GetStatusResponse:
    engine = control_pb2.EngineStatus(
        engine_id="engine-0",
        state=state,
        role=plan_pb2.ROLE_DECODE_HEAVY,
        chunk_size_tokens=64,
        running_decodes=3,
        kv_blocks_total=100,
        kv_blocks_used=used,
        kv_blocks_granted=5,
        num_moved_in=7,
        num_moved_out=2,
        waiting_requests=4,
    )
    counters = control_pb2.ClassCounters(num_finished=10, num_met_ttft=9, num_met_tpot=10, num_met_both=9)
    return control_pb2.GetStatusResponse(engines=[engine], classes=[counters], is_ready=True, generation=4)


def test_the_status_prefers_live_links_to_lost_ones_and_sums_attainment() -> None:
    ports = {"http": 8000, "metrics": 8003}
    processes = [ProcessRecord(name=f"router-{i}", kind="router", pid=1, num_starts=1, ports=ports) for i in range(2)]
    view = make_cluster_status(
        name="c",
        phase="ready",
        manifest="m",
        model="tiny",
        processes=[*processes, ProcessRecord(name="engine-0", kind="engine", pid=2, num_starts=1)],
        statuses={
            "router-0": status(control_pb2.ENGINE_STATE_LOST, 50),
            "router-1": status(control_pb2.ENGINE_STATE_READY, 20),
        },
        rollout="rolled back: slow",
    )
    (engine,) = view.engines
    assert (engine.state, engine.kv_blocks_free, engine.kv_blocks_used) == ("ready", 75, 20)
    assert (view.classes[0].name, view.classes[0].num_finished, view.classes[0].num_met_both) == ("default", 20, 18)
    assert view.is_ready
    console = Console(file=io.StringIO(), width=150)
    console.print(make_cluster_table(view))
    shown = console.file.getvalue()
    row = next(line for line in shown.splitlines() if "engine-0" in line)
    assert row.replace("│", " ").split() == ["engine-0", "D-heavy", "ready", "64", "3", "4", "75/20/100", "7/2", "0"]
    assert "rolled back: slow" in shown
    assert "20 finished, TTFT 90 %, TPOT 100 %, both 90 %" in shown
    assert "http://127.0.0.1:8000/v1/chat/completions" in make_curl_line(view)


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        (control_pb2.ENGINE_STATE_READY, "[green]ready[/]"),
        (control_pb2.ENGINE_STATE_DRAINING, "[yellow]draining[/]"),
        (control_pb2.ENGINE_STATE_LOST, "[red]lost[/]"),
        (control_pb2.ENGINE_STATE_REFUSED, "[red]refused[/]"),
        (control_pb2.ENGINE_STATE_CONNECTING, "[dim]starting[/]"),
    ],
)
def test_an_engines_state_has_its_colour_and_a_class_without_requests_no_shares(state: Any, shown: str) -> None:
    answer = status(state, 50)
    answer.classes[0].Clear()
    view = make_cluster_status(
        name="c",
        phase="ready",
        manifest="m",
        model="tiny",
        processes=[ProcessRecord(name="engine-0", kind="engine", pid=2, num_starts=1)],
        statuses={"router-0": answer},
    )
    table = make_cluster_table(view)
    assert list(table.columns[2].cells) == [shown]
    assert "finished" not in str(table.caption)


def test_a_decision_log_shows_candidates_and_every_event() -> None:
    candidate = {
        "engine_id": "engine-0",
        "role": "P-heavy",
        "queued_prefill_tokens": 12,
        "cached_tokens": 345,
        "queue_s": 0.001,
        "execute_s": 0.02,
        "transfer_s": 0.003,
        "is_feasible": True,
        "reason": "feasible",
    }
    place = {"kind": "Place", "engine_id": "engine-0", "reason": "feasible", "predicted_ttft_s": 0.024}
    hold = {"kind": "Hold", "reason": "no_engine"}
    events = [
        {"at_s": 0.0, "event": "placement", "decision": hold, "candidates": []},
        {"at_s": 0.1, "event": "placement", "decision": place, "candidates": [candidate]},
        {"at_s": 0.2, "event": "moved", "source": "engine-0", "target": "engine-2", "cause": "backflow"},
    ]
    console = Console(file=io.StringIO(), width=150)
    console.print(render_decision_log({"request_id": "r", "events": events}))
    shown = console.file.getvalue()
    assert "placement: hold (no_engine)" in shown
    assert "placement: engine-0 (feasible), predicted TTFT 24 ms" in shown
    assert "engine-0 P-heavy 12 345 1.0 20.0 3.0 24.0 feasible (chosen)" in " ".join(shown.split())
    assert "feasible (chosen)" in shown
    assert "345" in shown, "tokens that need not be computed"
    assert "24.0" in shown, "1 + 20 + 3 ms"
    assert "total: estimated wait" in shown
    assert shown.count("feasible: the first token would come within the TTFT objective") == 1
    assert "no_engine: no engine takes prompts" in shown
    assert "draining:" not in shown
    assert "moved: source engine-0, target engine-2, cause backflow" in shown
    assert "the best of the others" not in shown


@pytest.mark.parametrize(
    ("others_ms", "line"),
    [
        ({"b": 31.5, "c": 40.0}, "chosen: 24.0 ms; the best of the others, b: 31.5 ms, 7.5 ms more"),
        ({"b": 31.5, "c": 20.0}, "chosen: 24.0 ms; the best of the others, c: 20.0 ms, 4.0 ms less"),
    ],
)
def test_a_choice_is_shown_beside_what_the_others_would_have_cost(others_ms: dict[str, float], line: str) -> None:
    candidates = [
        {
            "engine_id": engine,
            "role": "",
            "queued_prefill_tokens": 0,
            "queue_s": total_ms / 1000 - 0.01,
            "execute_s": 0.01,
            "transfer_s": 0.0,
            "reason": "feasible",
        }
        for engine, total_ms in {"a": 24.0, **others_ms}.items()
    ]
    decision = {"kind": "Place", "engine_id": "a", "reason": "feasible", "predicted_ttft_s": 0.024}
    event = {"at_s": 0.1, "event": "placement", "decision": decision, "candidates": candidates}
    console = Console(file=io.StringIO(), width=150)
    console.print(render_decision_log({"request_id": "r", "events": [event]}))
    shown = console.file.getvalue()
    assert line in shown
    # An engine that costs more is chosen by a rule, which stands beside it.
    assert "the one with the fewest queued tokens" in shown


def find_reasons() -> set[str]:
    """Each word that the core's policies give as a reason, read from their code."""
    words: set[str] = set()
    for path in Path(scheduling.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found: list[ast.AST] = []
            if isinstance(node, ast.keyword) and node.arg == "reason":
                found = [node.value]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found = [node.value] if node.targets[0].id == "reason" else []
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "place":
                found = list(node.args)
            elif isinstance(node, ast.FunctionDef) and re.search(r"reason|explain_no", node.name):
                found = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
            constants = [part for one in found for part in ast.walk(one) if isinstance(part, ast.Constant)]
            words |= {part.value for part in constants if isinstance(part.value, str) and part.value}
    return words


def test_every_word_of_a_decision_has_a_legend() -> None:
    reasons = find_reasons()
    assert {"feasible", "ttft", "kv", "recovery_cap", "no_report", "shortest_queue"} <= reasons
    assert reasons - set(MEANINGS) == set()
    assert set(MEANINGS) - reasons == set(), "words that no policy says"


def test_a_stream_measures_its_first_piece_and_its_longest_gap() -> None:
    stream = CompletionStream()
    for now_s, piece in ((10.5, "a"), (10.6, "b"), (11.6, "c")):
        stream.take({"choices": [{"delta": {"content": piece}}]}, now_s, 10.0)
    assert not stream.is_complete
    stream.take({"choices": [{"delta": {}, "finish_reason": "length"}]}, 11.7, 10.0)
    stream.take({"choices": [], "usage": {"completion_tokens": 3}}, 11.7, 10.0)
    assert (stream.text, stream.output_tokens, stream.is_complete) == ("abc", 3, True)
    assert (stream.ttft_s, round(stream.longest_gap_s, 6)) == (0.5, 1.0)


class FakeCluster:
    """Takes manifests."""

    def __init__(self, manifest: ServingCluster) -> None:
        self.manifest = manifest
        self.changed = asyncio.Event()

    def apply(self, manifest: ServingCluster) -> None:
        self.manifest = manifest
        self.changed.set()


@pytest.mark.parametrize(
    "command",
    [("up",), ("plan", "--trace", "{trace}"), ("simulate", "--trace", "{trace}", "--rate", "1")],
    ids=lambda command: command[0],
)
def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    path, trace = tmp_path / "m.yaml", tmp_path / "trace.csv"
    path.write_bytes(b"kind: \xff")
    trace.write_text("input_tokens,output_tokens\n100,10\n")
    done = CliRunner().invoke(cli, [*(word.format(trace=trace) for word in command), str(path)])
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert "is no UTF-8 text: byte 6 is 0xff" in " ".join(done.output.split())


@pytest.mark.parametrize("is_replaced", [False, True], ids=["written in place", "replaced as editors do"])
async def test_edits_of_the_file_are_followed(tmp_path: Path, *, is_replaced: bool) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(EXAMPLE.read_text())
    text = path.read_text()
    cluster, lines = FakeCluster(parse_manifest(text)), []
    task = asyncio.create_task(follow_manifest(path, text, cluster, lambda manifest: [], lines.append))
    target = tmp_path / "new" if is_replaced else path
    target.write_text(text.replace("decodeHeavy: 64", "decodeHeavy: 128"))
    target.replace(path)
    async with asyncio.timeout(20):
        await cluster.changed.wait()
    task.cancel()
    assert cluster.manifest.spec.chunk_sizes.decode_heavy == 128
    assert lines == ["m.yaml: spec.chunkSizes.decodeHeavy 64 -> 128 (live)"]
