"""Tunes a local cluster's sliders with the operator's tuner, and reports its decisions."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sluice_cli.local_cluster.cluster_status import AutotuneSummary
from sluice_core.strategies import get_strategy
from sluice_operator.api.sliders import Sliders, resolve_sliders, resolve_strategy
from sluice_operator.autotune.search_process import SearchRunner
from sluice_operator.autotune.tuner import Tuner
from sluice_operator.routers.attainment import AttainmentWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sluice.v1 import control_pb2
    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_core.slo_attainment import SloCounts
    from sluice_operator.api.serving_cluster import ServingCluster
    from sluice_operator.autotune.search_messages import SearchResult
    from sluice_operator.autotune.search_process import RunSearch
    from sluice_operator.autotune.tuner import TunerInputs


class LocalAutotuner:
    """The tuner of a local cluster, and what it has reported so far.

    Args:
        directory: Where other commands read the decisions.
        report: Takes a line for people.
        wake: Called when a search has ended, to reconcile.
        clock: Monotonic seconds.
        ask: Answers searches for sliders; None: in processes of their own.
    """

    def __init__(
        self,
        directory: ClusterDirectory,
        *,
        report: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
        ask: RunSearch | None = None,
    ) -> None:
        self._directory = directory
        self._report = report
        self._clock = clock
        self._tuner = Tuner(ask or SearchRunner().run, enqueue=wake, now=clock)
        self._window = AttainmentWindow()
        self._in_force: tuple[Sliders, Sliders] | None = None
        self.status: AutotuneSummary | None = None
        directory.write_autotune(None)

    def take(self, statuses: Sequence[control_pb2.GetStatusResponse]) -> None:
        """Takes the routers' counters."""
        for status in statuses:
            self._window.take(self._clock(), status)

    @property
    def counts(self) -> SloCounts:
        """Requests that the routers finished so far."""
        return self._window.total

    def reconcile(self, circumstances: TunerInputs) -> ServingCluster:
        """Decides; returns the manifest with the sliders that are to be in force."""
        effective = self._tuner.update(circumstances)
        asked_for, in_force = resolve_sliders(circumstances.cluster.spec), resolve_sliders(effective.spec)
        if asked_for.strategy:
            in_force = replace(in_force, strategy=resolve_strategy(effective.spec).name)
        # What the user changed is reported with the edit.
        if self._in_force is not None and asked_for == self._in_force[0] and in_force != self._in_force[1]:
            self._report(f"autotune: {format_sliders(self._in_force[1])} -> {format_sliders(in_force)} (live)")
        self._in_force = asked_for, in_force
        self._show()
        return effective

    def is_due(self, circumstances: Callable[[], TunerInputs]) -> bool:
        """Whether ``reconcile`` would decide something; cheap, because every status asks."""
        return self._tuner.needs_update(circumstances)

    def stop(self) -> None:
        """Ends the search under way."""
        self._tuner.stop()

    def _show(self) -> None:
        """Reports the decision if it differs from the last one."""
        verdict, answer, old = self._tuner.describe_status(), self._tuner.result, self.status
        if verdict is None or verdict.reason == "Off":
            view = None
        else:
            view = AutotuneSummary(reason=verdict.reason, message=verdict.message, **_describe_answer(answer))
        if view == old:
            return
        self.status = view
        self._directory.write_autotune(None if view is None else asdict(view))
        if view is not None and (old is None or old.reason != view.reason):
            self._report(f"autotune: {view.message}")
        if answer is not None and (old is None or _describe_answer(answer).items() - asdict(old).items()):
            self._report(
                f"autotune: recommends {format_sliders(answer.sliders)}: {answer.attainment:.0%} of the requests would"
                f" meet their objectives, {answer.in_force_attainment:.0%} with the sliders in force"
            )


def format_sliders(sliders: Sliders) -> str:
    """Writes sliders for people."""
    strategy = f"{get_strategy(sliders.strategy).title}, " if sliders.strategy else ""
    chunks = f"chunks {sliders.prefill_heavy_tokens}/{sliders.decode_heavy_tokens}"
    return f"{strategy}prefillHeavy {sliders.num_prefill_heavy}, {chunks}"


def _describe_answer(answer: SearchResult | None) -> dict[str, Any]:
    if answer is None:
        return {}
    return {
        "strategy": answer.sliders.strategy and get_strategy(answer.sliders.strategy).title,
        "prefill_heavy": answer.sliders.num_prefill_heavy,
        "prefill_heavy_tokens": answer.sliders.prefill_heavy_tokens,
        "decode_heavy_tokens": answer.sliders.decode_heavy_tokens,
        "predicted_attainment": round(answer.attainment, 3),
    }
