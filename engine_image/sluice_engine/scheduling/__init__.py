"""Hooks of vLLM's scheduler: the plan, chunks of prefills, moves, load."""
