"""Shows the results of ``sluice simulate`` on a terminal."""

from __future__ import annotations

from rich.table import Table


def make_results_table(report: dict[str, object]) -> Table:
    """Shows the metrics on a terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("cluster", f"{report['model']} on {report['gpu']}, {report['strategy']} {report['engines']}")
    if "goodput_rps" in report:
        table.add_row("goodput", f"{report['goodput_rps']:.2f} ± {report['goodput_sd']:.2f} requests/s")
    else:
        table.add_row("rate", f"{report['rate_rps']} requests/s")
    for name in ("attainment", "attainment_longest_tenth"):
        table.add_row(name.replace("_", " "), f"{100 * float(str(report[name])):.1f} %")
    for name in ("ttft_s", "tpot_s", "itl_s"):
        values = report[name]
        assert isinstance(values, dict)
        shown = "  ".join(f"{key} {value * 1e3:.0f} ms" for key, value in values.items() if value is not None)
        table.add_row(name.removesuffix("_s").upper(), shown)
    moves = report["moves"]
    assert isinstance(moves, dict)
    table.add_row("moves", "  ".join(f"{cause} {number}" for cause, number in moves.items() if number) or "none")
    if report["prefix_hit_rate"] is not None:
        table.add_row("prefix hit rate", f"{100 * float(str(report['prefix_hit_rate'])):.1f} % of prompt tokens")
    for name in ("preemptions", "rejected", "requests"):
        table.add_row(name, str(report[name]))
    return table
