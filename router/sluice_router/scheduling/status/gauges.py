"""Gauges of the router, read from its state at a scrape; ``observability.metrics`` has counters and histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.v1 import control_pb2
from sluice.wire_fields import names_by_value
from sluice_router.scheduling.state import RouterState

_STATE_NAMES = {value: name.lower() for value, name in names_by_value(control_pb2.EngineState).items()}


class RouterCollector(Collector):
    """Gauges read from the state at a scrape, and the counters.

    Args:
        state: The router's state.
        clock: The router's clock.
    """

    def __init__(self, state: RouterState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yields every family."""
        state = self._state
        yield from state.metrics.collect()
        yield from self._collect_plain()
        yield self._collect_attainment()
        engines = GaugeMetricFamily("sluice_engines", "Engines by role and state.", labels=("role", "state"))
        for (role, name), number in sorted(self._count_engines().items()):
            engines.add_metric((role, name), number)
        yield engines
        error = GaugeMetricFamily(
            "sluice_latency_model_error_ratio", "Mean relative error of the latency model.", labels=("engine",)
        )
        for engine in state.engines.table:
            error.add_metric((engine.engine_id,), engine.latency.relative_error)
        yield error
        yield self._collect_traffic()

    def _collect_plain(self) -> Iterator[Metric]:
        state = self._state
        plan = state.active.plan
        waiting, running = len(state.requests.waiting), len(state.requests.live) - len(state.requests.waiting)
        yield GaugeMetricFamily("sluice_requests_waiting", "Requests that wait for an engine.", value=waiting)
        yield GaugeMetricFamily("sluice_requests_running", "Requests on engines.", value=running)
        # The names that dashboards of vLLM know.
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait for an engine.", value=waiting)
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests on engines.", value=running)
        holding = GaugeMetricFamily("sluice_holding", "1 while there is to be no engine until a request comes.")
        holding.add_metric((), float(state.active.is_holding))
        yield holding
        generation = plan.generation if plan is not None else 0
        yield GaugeMetricFamily("sluice_plan_generation", "Generation of the plan in force.", value=generation)
        in_flight = sum(engine.migrations_out for engine in state.engines.connected.values())
        yield GaugeMetricFamily("sluice_moves_running", "Moves in flight.", value=in_flight)

    def _collect_attainment(self) -> Metric:
        now, attainment = self._clock(), self._state.statistics.attainment
        family = GaugeMetricFamily(
            "sluice_attainment_ratio",
            "Share of requests of the last five minutes that met their objectives.",
            labels=("slo_class",),
        )
        for name in sorted(attainment.totals):
            ratio = attainment.window(now, [name]).attainment
            if ratio is not None:
                family.add_metric((name,), ratio)
        return family

    def _collect_traffic(self) -> Metric:
        """Counts bytes per address: there are as many series as addresses, whatever ids engines there have had."""
        family = CounterMetricFamily(
            "sluice_engine_link_bytes", "Bytes on engine streams.", labels=("engine", "address", "direction")
        )
        for address, endpoint in sorted(self._state.engines.endpoints.items()):
            engine_id = "" if endpoint.engine is None else endpoint.engine.engine_id
            family.add_metric((engine_id, address, "up"), endpoint.traffic.num_bytes_up)
            family.add_metric((engine_id, address, "down"), endpoint.traffic.num_bytes_down)
        return family

    def _count_engines(self) -> dict[tuple[str, str], int]:
        numbers: dict[tuple[str, str], int] = {}
        for endpoint in self._state.engines.endpoints.values():
            engine = endpoint.engine
            value = control_pb2.ENGINE_STATE_CONNECTING if engine is None else engine.status
            role = engine.role.value if engine is not None and engine.role is not None else ""
            name = _STATE_NAMES[value]
            numbers[role, name] = numbers.get((role, name), 0) + 1
        return numbers
