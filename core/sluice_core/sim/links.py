"""The links of a simulated cluster: KV goes over each of them one transfer after the other."""

from __future__ import annotations

from sluice_core.sim.sim_setup import EngineSetup


class SimLinks:
    """When each link is free; mutable.

    Attributes:
        transfer_s: Time that requests spent in transfers, waits for a link included.
    """

    def __init__(self) -> None:
        self.transfer_s = 0.0
        self._free_at_s: dict[str, float] = {}

    def send(self, now: float, source: EngineSetup, num_tokens: int, *, is_ahead: bool = False) -> float:
        """Put the KV of some tokens on the source's link.

        Args:
            now: Seconds of the simulated clock.
            source: The engine that sends.
            num_tokens: Tokens.
            is_ahead: Their request is computed on meanwhile; False: it waits, which counts in ``transfer_s``.

        Returns:
            When they arrive.
        """
        link = source.link
        name = link.name or source.engine_id
        free_at_s = self._free_at_s.get(name, 0.0)
        num_bytes = num_tokens * source.kv_bytes_per_token
        self._free_at_s[name], arrives_at_s = link.speed.schedule(now, free_at_s, num_bytes)
        if not is_ahead:
            self.transfer_s += arrives_at_s - now
        return arrives_at_s
