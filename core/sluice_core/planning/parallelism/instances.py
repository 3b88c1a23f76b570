"""Instances of a model: how many GPUs share its layers, in how many stages, and which of these a cluster can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sluice_core.latency.iteration_time import IterationProfile


class Phase(StrEnum):
    """What an instance computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Parallelism(NamedTuple):
    """How an instance shares a model among its GPUs.

    Args:
        tensor: GPUs that share each layer (TP, the paper's intra-op degree).
        pipeline: Stages of equal layers (PP, the paper's inter-op degree).
    """

    tensor: int
    pipeline: int

    @property
    def num_gpus(self) -> int:
        """GPUs of an instance."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstance:
    """A model on the GPUs of an instance.

    Args:
        parallelism: How they share it.
        stage: How long an iteration takes in one stage.
        kv_capacity_tokens: Tokens that its KV cache holds.
        kv_bytes_per_token: Bytes of KV cache per token, over all of its GPUs.
    """

    parallelism: Parallelism
    stage: IterationProfile
    kv_capacity_tokens: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNodes:
    """The nodes of a cluster.

    Args:
        num_nodes: Nodes, at least 1; an instance may span all of them.
        gpus_per_node: GPUs of each, at least 1.

    Raises:
        ValueError: Names the field that is below 1.
    """

    num_nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        for name, value in (("num_nodes", self.num_nodes), ("gpus_per_node", self.gpus_per_node)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return self.num_nodes * self.gpus_per_node


def list_parallelisms(nodes: GpuNodes, num_layers: int) -> list[Parallelism]:
    """List how an instance may share a model: layers within a node, equal stages over as many nodes as there are.

    Source: DistServe, Algorithm 1, lines 2 and 3; stages of unequal layers are left out.
    """
    return [
        Parallelism(tensor, pipeline)
        for tensor in range(1, nodes.gpus_per_node + 1)
        for pipeline in range(1, nodes.num_gpus // tensor + 1)
        if num_layers % pipeline == 0
    ]


def count_nodes(groups: Sequence[int], gpus_per_node: int) -> int:
    """Count the nodes for groups of GPUs, none of which spans two: the largest first, each where it fits first."""
    free: list[int] = []
    for group in sorted(groups, reverse=True):
        node = next((number for number, gpus in enumerate(free) if gpus >= group), None)
        if node is None:
            free.append(gpus_per_node - group)
        else:
            free[node] -= group
    return len(free)
