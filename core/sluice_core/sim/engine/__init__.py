"""One simulated engine: its scheduler, KV blocks and preemption."""
