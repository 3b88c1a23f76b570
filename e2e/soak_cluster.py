"""The cluster that a soak loads: the example of the tiny model, and requests with the answers of stock vLLM."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import workload
import yaml
from cluster import Cluster, run_cluster
from examples import tiny_model

from sluice_core.strategies import STRATEGIES

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from workload import Answer, Request

ROOT = Path(__file__).parents[1]


class Soak:
    """What clients share: the requests, in turn, and what has become of them.

    Args:
        cluster: Under load.
        known: Requests with the answers of stock vLLM.
        rng: Of what is random.
    """

    def __init__(self, cluster: Cluster, known: list[tuple[Request, Answer]], rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.known: Iterator[tuple[Request, Answer]] = itertools.cycle(known)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.is_over = False

    def fail(self, what: str) -> None:
        """Notes an answer that was wrong or lost."""
        self.counts["wrong"] += 1
        self.failures.append(what)
        print(what, flush=True)

    async def switch_strategies(self, pause_s: float) -> None:
        """Puts a drawn strategy in force after each drawn pause."""
        while not self.is_over:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * pause_s)
            title = self.rng.choice(sorted(strategy.title for strategy in STRATEGIES.values()))
            self.cluster.edit(lambda spec, title=title: spec.update(strategy=title))
            self.counts[f"switched to {title}"] += 1


@contextmanager
def run_soak_cluster(
    *, ports: str, service_port: int, num_routers: int, num_requests: int, tokens_per_hop: int
) -> Iterator[tuple[Cluster, list[tuple[Request, Answer]]]]:
    """Run the example; in the end it must serve, and be idle with all blocks free."""
    # Also then nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    models = ROOT / ".sluice" / "volumes" / "models"
    tiny_model.make_tiny_model(models / "tiny")
    requests = workload.make_requests(num_requests, tokens_per_hop=tokens_per_hop)
    answers = workload.answers(models / "tiny", requests, ROOT / ".sluice" / "e2e")
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny-cpu.yaml").read_text())
    manifest["spec"]["router"]["service"]["port"] = service_port
    manifest["spec"]["router"]["replicas"] = num_routers
    with (
        tempfile.TemporaryDirectory() as folder,
        run_cluster(Path(folder) / "cluster", manifest, models=models, ports=ports) as cluster,
    ):
        cluster.wait_ready()
        yield cluster, list(zip(requests, answers, strict=True))
        cluster.wait_ready()
        cluster.wait_idle(timeout_s=90)
