"""What the demo counts, and the summary that it ends with."""

from __future__ import annotations

from sluice_cli.demo.measurements import DemoTotals, make_summary_table
from sluice_cli.demo.openai_client import CompletionStream
from sluice_cli.local_cluster.cluster_status import ClusterStatus, EngineStatusRow

ENGINES = (
    EngineStatusRow(engine_id="engine-0", kv_blocks_free=70, kv_blocks_total=100),
    EngineStatusRow(engine_id="engine-1", kv_blocks_free=30, kv_blocks_total=200),
    EngineStatusRow(engine_id="engine-2"),  # it has told nothing yet
)
STATUS = ClusterStatus(name="c", phase="ready", manifest="m", model="tiny", routers=(), engines=ENGINES, classes=())
DOWN, BACK = ({"event": "moved", "cause": cause} for cause in ("degrade", "backflow"))


def make_finished(*, is_slo_met: bool) -> dict[str, object]:
    return {"event": "finished", "is_slo_met": is_slo_met}


def test_the_summary_says_what_all_streams_were_and_how_many_of_those_that_finished_met_their_objectives() -> None:
    totals = DemoTotals(num_recovered=5, num_exact=2, num_repeated=4, slider_s=0.256)
    for tokens, reason, events in (
        (30, "length", [DOWN, make_finished(is_slo_met=True)]),
        (20, "stop", [BACK, DOWN, make_finished(is_slo_met=False)]),
        (7, "", [{"event": "placement"}]),
    ):
        totals.add(CompletionStream(output_tokens=tokens, finish_reason=reason), {"events": events})
    names, values = (list(column.cells) for column in make_summary_table(totals, STATUS).columns)
    assert dict(zip(names, values, strict=True)) == {
        "complete streams": "2 of 3",
        "output tokens": "57",
        "decodes moved: degrade": "2",
        "decodes moved: backflow": "1",
        "decodes recovered from a killed engine": "5",
        "greedy streams with the same text despite the kill": "2 of 4",
        "time from edit to new slider": "0.26 s",
        "requests that met their SLOs": "1 of 2",
        "KV blocks free now": "100 of 300",
    }
