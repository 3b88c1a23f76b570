"""Emulated engines: vLLM's real scheduler, with a clock in place of the GPU."""
