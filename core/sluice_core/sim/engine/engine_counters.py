"""What a simulated engine counts about itself."""

from __future__ import annotations


class EngineCounters:
    """What an engine has done; mutable, changed by its engine only.

    Attributes:
        busy_s: Time in iterations.
        kv_block_seconds: Blocks in use, summed over that time.
        peak_blocks: Most blocks in use.
        num_iterations: Iterations.
        num_output_tokens: Tokens generated.
        num_prefill_tokens: Prompt tokens computed, recompute included.
        num_completed_prefill_tokens: Of these, of prefills that were completed.
        num_lost_prefill_tokens: Of these, of prefills that the engine's death cut off.
        num_preemptions: Preemptions.
        num_interrupts: Iterations of prefills that stopped for a more urgent prompt, where an operator ended.
        blocking_s: From the arrivals of these prompts until the iterations had stopped.
    """

    __slots__ = (
        "blocking_s",
        "busy_s",
        "kv_block_seconds",
        "num_completed_prefill_tokens",
        "num_interrupts",
        "num_iterations",
        "num_lost_prefill_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "peak_blocks",
    )

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.kv_block_seconds = 0.0
        self.peak_blocks = 0
        self.num_iterations = 0
        self.num_output_tokens = 0
        self.num_prefill_tokens = 0
        self.num_completed_prefill_tokens = 0
        self.num_lost_prefill_tokens = 0
        self.num_preemptions = 0
        self.num_interrupts = 0
        self.blocking_s = 0.0
