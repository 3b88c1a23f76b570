"""The newest plan that the engine received: its role, its chunk size, and the policy of its strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice_core.latency import OnlineLatencyModel
from sluice_core.records import Role
from sluice_core.strategies import INITIAL_STRATEGY, get_strategy
from sluice_engine.core_messages import CAPABILITIES, ConfigureAnswer, ConfigureCommand

if TYPE_CHECKING:
    from sluice_core.scheduling.decode_set import DecodeSet
    from sluice_core.scheduling.engine_policy import EnginePolicy


class ReceivedPlan:
    """The newest plan that was not refused, and its strategy's policy.

    Args:
        decodes: The engine's running decodes, which the policy orders.
        max_batch_tokens: Largest chunk size; in force until the first plan.

    Attributes:
        command: The plan, as it came.
        role: The engine's role.
        policy: The strategy's policy.
        latency: How long the engine's iterations take, as far as a policy in force has needed it.
        last_chunk_size_tokens: The last chunk size that was not 0.
    """

    def __init__(self, decodes: DecodeSet, *, max_batch_tokens: int) -> None:
        self._decodes = decodes
        self._max_batch_tokens = max_batch_tokens
        self.latency = OnlineLatencyModel()
        self.last_chunk_size_tokens = max_batch_tokens
        self.configure(
            ConfigureCommand(
                generation=0,
                role=Role.DECODE_HEAVY,
                chunk_size_tokens=max_batch_tokens,
                strategy=INITIAL_STRATEGY.name,
            )
        )

    command: ConfigureCommand
    role: Role
    policy: EnginePolicy

    def configure(self, command: ConfigureCommand) -> ConfigureAnswer:
        """Puts a plan in force, from the next iteration on.

        Returns:
            What is in force now; an older generation, or a plan that cannot be carried out, changes nothing.
        """
        error = ""
        if command.generation >= getattr(self, "command", command).generation:
            try:
                self._put_in_force(command)
            except ValueError as refusal:
                error = str(refusal)
        return ConfigureAnswer(
            generation=self.command.generation,
            role=self.command.role,
            chunk_size_tokens=self.command.chunk_size_tokens,
            error=error,
        )

    def _put_in_force(self, command: ConfigureCommand) -> None:
        role = Role(command.role)
        if not 0 <= command.chunk_size_tokens <= self._max_batch_tokens:
            raise ValueError(f"chunk size {command.chunk_size_tokens} is not in 0..{self._max_batch_tokens}")
        in_force = getattr(self, "command", None)
        if in_force is None or (in_force.strategy, in_force.parameters) != (command.strategy, command.parameters):
            strategy = get_strategy(command.strategy)
            strategy.check_capabilities(CAPABILITIES)
            policy = strategy.make_engine(strategy.read_parameters(command.parameters))
            policy.bind(self._decodes, self.latency)
            self.policy = policy  # else it stays, with what it has measured
        self.policy.observe_chunk_sizes(command.chunk_sizes_tokens)
        self.command, self.role = command, role
        if command.chunk_size_tokens:
            self.last_chunk_size_tokens = command.chunk_size_tokens
        self._decodes.role = role
        self._decodes.is_draining = command.is_draining
