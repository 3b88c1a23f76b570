"""A router's part of the plan on its way to the EngineCore, and the last one that it acknowledged.

Routers may be on different generations for a second: the highest (cluster uid, generation) wins, whichever router
brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2
from sluice_core.strategies import INITIAL_STRATEGY
from sluice_engine.core_messages import ConfigureCommand
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from sluice_engine.core_messages import ConfigureAnswer


class PlanRelay:
    """The part in force, and the newest one on its way to the EngineCore.

    Args:
        chunk_size_tokens: Chunk size before any plan.
    """

    def __init__(self, chunk_size_tokens: int) -> None:
        self._in_force = wire.Configured()
        self._newest: tuple[str, int] = ("", 0)
        self._command = ConfigureCommand(
            generation=0, role="D-heavy", chunk_size_tokens=chunk_size_tokens, strategy=INITIAL_STRATEGY.name
        )
        self._is_leaving = False

    @property
    def in_force(self) -> wire.Configured | None:
        """The last acknowledged part; None before the first."""
        return self._in_force if self._in_force.generation else None

    def take(self, message: wire.Configure) -> ConfigureCommand | None:
        """Takes a router's part.

        Returns:
            The command for the EngineCore; None when the part is not newer than the newest.

        Raises:
            ValueError: A field has no meaning here.
        """
        plan = (message.cluster_uid, message.generation)
        if plan <= self._newest:
            return None
        # The EngineCore knows nothing of clusters: it gets a count of this process. So the plan of another cluster, or
        # the drain of this process, is newer to it than anything before.
        self._command = wire_conversion.configure_command(message, self._command.generation + 1, self._is_leaving)
        self._newest = plan
        return self._command

    def leave(self) -> ConfigureCommand:
        """Starts a drain that no plan can end; returns the command for the EngineCore."""
        self._is_leaving = True
        self._command = msgspec.structs.replace(
            self._command, generation=self._command.generation + 1, is_draining=True
        )
        return self._command

    def acknowledge(self, message: wire.Configure, answer: ConfigureAnswer) -> wire.Configured | None:
        """Takes the EngineCore's answer to a part.

        Returns:
            The message for every router; None when a newer part is in force already.
        """
        plan = (message.cluster_uid, message.generation)
        in_force = (self._in_force.cluster_uid, self._in_force.generation)
        if plan < in_force:
            return None
        self._in_force = wire.Configured(
            cluster_uid=message.cluster_uid,
            generation=message.generation,
            role=wire_conversion.WIRE_ROLES.get(answer.role, plan_pb2.ROLE_UNSPECIFIED),
            chunk_size_tokens=answer.chunk_size_tokens,
        )
        return self._in_force

    def refuse(self, message: wire.Configure, error: str) -> wire.Configured:
        """A part cannot be taken: the old one stays, and is the newest again unless a newer one came meanwhile.

        Returns:
            The answer to the router that brought it.
        """
        if self._newest == (message.cluster_uid, message.generation):
            self._newest = (self._in_force.cluster_uid, self._in_force.generation)
        return wire.Configured(cluster_uid=message.cluster_uid, generation=message.generation, error=error)
