"""The plan of a local cluster: its generation, and which engine has which role and which drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from sluice_operator.api.sliders import resolve_sliders
from sluice_operator.planning.plan_message import render_plan
from sluice_operator.planning.roles import decide_roles

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from sluice.v1 import plan_pb2
    from sluice_cli.local_cluster.cluster_directory import ClusterDirectory
    from sluice_core.records import EngineId, Role
    from sluice_operator.api.serving_cluster import ServingCluster


class ClusterPlan:
    """The newest plan and what it was made from.

    Args:
        directory: Stores generations and plans.
    """

    def __init__(self, directory: ClusterDirectory) -> None:
        self.plan: plan_pb2.Plan | None = None
        self.roles: dict[EngineId, Role] = {}
        self._directory = directory
        self._draining: set[EngineId] = set()
        self._leaving: set[EngineId] = set()

    def drain(self, engine_ids: Iterable[EngineId], *, is_leaving: bool) -> None:
        """Lets engines hand their requests over from the next plan on.

        Args:
            engine_ids: The engines.
            is_leaving: True: they end afterwards, so that others take their roles.
        """
        self._draining.update(engine_ids)
        if is_leaving:
            self._leaving.update(engine_ids)

    def undrain(self, engine_id: EngineId) -> None:
        """Lets a drained engine serve again from the next plan on."""
        self._draining.discard(engine_id)

    def remove(self, engine_id: EngineId) -> None:
        """Drops an engine that has ended."""
        self.roles.pop(engine_id, None)
        self._draining.discard(engine_id)
        self._leaving.discard(engine_id)

    def update(
        self,
        manifest: ServingCluster,
        engine_ids: Iterable[EngineId],
        loads: Mapping[EngineId, int],
        serving: Collection[EngineId],
    ) -> plan_pb2.Plan | None:
        """Makes and stores the next plan.

        Args:
            manifest: What shall run, with the sliders in force.
            engine_ids: Engines that run, leaving ones included.
            loads: Work of each engine, in any one unit.
            serving: Those of the engines that serve.

        Returns:
            The plan; None when the one in force says the same already, or when there is no engine.
        """
        staying = [engine_id for engine_id in engine_ids if engine_id not in self._leaving]
        leaving = {engine_id: role for engine_id, role in self.roles.items() if engine_id in self._leaving}
        self.roles = leaving | decide_roles(
            self.roles,
            serving=[engine_id for engine_id in staying if engine_id in serving],
            away=[engine_id for engine_id in staying if engine_id not in serving],
            sliders=resolve_sliders(manifest.spec),
            replicas=manifest.spec.replicas,
            loads=loads,
        )
        old = self.plan
        if not self.roles or (old and old == self._render(manifest, old.generation, old.cluster_uid)):
            return None
        uid, generation = self._directory.next_generation()
        self.plan = self._render(manifest, generation, uid)
        self._directory.write_plan(MessageToDict(self.plan, preserving_proto_field_name=True))
        return self.plan

    def _render(self, manifest: ServingCluster, generation: int, uid: str) -> plan_pb2.Plan:
        return render_plan(manifest, self.roles, generation=generation, cluster_uid=uid, draining=self._draining)
