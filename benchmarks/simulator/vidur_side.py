"""Vidur's half of ``compare_vidur.py``: runs in its own environment, reads a workload, prints the result as JSON.

    python vidur_side.py WORKLOAD.json

Vidur simulates the same requests on the same number of replicas with its own Sarathi scheduler. What an iteration
takes is a stand-in for its predictor, with our coefficients: its own asks the network for profiles and trains on
them. The stand-in's time is taken off its account, nothing is trained or loaded, and every metric and trace is
switched off, so the figure flatters it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import vidur.scheduler.global_scheduler.base_global_scheduler as global_scheduler
from vidur import simulator
from vidur._native.entities import ExecutionTime
from vidur.config import (
    CacheConfig,
    ClusterConfig,
    MetricsConfig,
    ReplicaConfig,
    RoundRobinGlobalSchedulerConfig,
    SarathiSchedulerConfig,
    SimulationConfig,
    SyntheticRequestGeneratorConfig,
)
from vidur.entities import Request

_NUM_LAYERS = 32  # of the model that Vidur believes in; the stand-in divides by it what Vidur multiplies
_FOR_PEOPLE = (
    "write_metrics",
    "enable_chrome_trace",
    "store_plots",
    "store_request_metrics",
    "store_batch_metrics",
    "store_utilization_metrics",
)
_OTHER_OPERATORS = 11  # times that the stand-in leaves at 0


class Predictor:
    """Stands in for Vidur's execution time predictors: one figure per iteration from a table and six coefficients.

    Args:
        profile: Our profile, as plain numbers.
    """

    def __init__(self, profile: dict[str, Any]) -> None:
        self._profile = profile
        self.spent_s = 0.0
        self.num_iterations = 0

    def get_execution_time(self, batch: Any, _stage: int) -> Any:
        """Estimate an iteration as ``IterationProfile.estimate_iteration_s`` does."""
        began = time.process_time()
        chunks, prefill, work, decodes, context = 0, 0, 0.0, 0, 0
        for request, tokens, kv_tokens in zip(batch.requests, batch.num_q_tokens, batch.num_kv_tokens, strict=True):
            if request.is_prefill_complete:
                decodes += 1
                context += kv_tokens
            else:
                chunks += 1
                prefill += tokens
                work += tokens * (kv_tokens - tokens / 2)
        profile = self._profile
        row = -(-(prefill + decodes) // 8)
        seconds = profile["linear_s"][min(row, len(profile["linear_s"]) - 1)]
        seconds += chunks * profile["prefill_base_s"] + prefill * profile["prefill_token_s"]
        seconds += work * profile["prefill_work_s"] + (chunks + decodes) * profile["host_sequence_s"]
        if decodes:
            seconds += (
                profile["decode_base_s"] + decodes * profile["decode_request_s"] + context * profile["decode_context_s"]
            )
        self.num_iterations += 1
        self.spent_s += time.process_time() - began
        milliseconds = seconds * 1e3 / _NUM_LAYERS
        return ExecutionTime(_NUM_LAYERS, 0.0, 0.0, 0.0, milliseconds, *[0.0] * (_OTHER_OPERATORS - 1))


def make_config(workload: dict[str, Any], folder: Path) -> SimulationConfig:
    """Make the cluster, with everything off that is written for people."""
    off = dict.fromkeys(_FOR_PEOPLE, False)
    return SimulationConfig(
        log_level="error",
        cluster_config=ClusterConfig(
            num_replicas=workload["num_engines"],
            replica_config=ReplicaConfig(
                model_name="meta-llama/Llama-3-8B",
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a100",
                network_device="a100_dgx",
            ),
            cache_config=CacheConfig(block_size=16, num_blocks=workload["kv_blocks"], watermark_blocks_fraction=0.0),
            global_scheduler_config=RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=SarathiSchedulerConfig(
                batch_size_cap=workload["max_num_seqs"], chunk_size=workload["chunk_size_tokens"]
            ),
        ),
        request_generator_config=SyntheticRequestGeneratorConfig(max_tokens=16_384),
        metrics_config=MetricsConfig(output_dir=str(folder), **off),
    )


def main() -> None:
    """Simulate and print."""
    path = Path(sys.argv[1])
    workload = json.loads(path.read_text())
    requests = [
        Request(arrived_at=at_s, num_prefill_tokens=prompt, num_decode_tokens=output)
        for at_s, prompt, output in workload["arrivals"]
    ]
    predictor = Predictor(workload["profile"])
    # Vidur has no seam for either: it makes both by name, from registries.
    global_scheduler.ExecutionTimePredictorRegistry.get = lambda *_args, **_names: predictor
    simulator.RequestGeneratorRegistry.get = lambda *_args: type("Given", (), {"generate": lambda _self: requests})()
    simulation = simulator.Simulator(make_config(workload, path.parent / "vidur"))
    began = time.process_time()
    simulation.run()
    cpu_s = time.process_time() - began
    ttfts = sorted(request.prefill_completed_at - request.arrived_at for request in requests)
    print(
        json.dumps(
            {
                "cpu_s": cpu_s - predictor.spent_s,
                "stand_in_s": predictor.spent_s,
                "iterations": predictor.num_iterations,
                "ends_at_s": max(request.completed_at for request in requests),
                "ttft_mean_s": sum(ttfts) / len(ttfts),
                "ttft_p90_s": ttfts[int(0.9 * len(ttfts))],
            }
        )
    )


if __name__ == "__main__":
    main()
