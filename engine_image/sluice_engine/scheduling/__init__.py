"""Hooks of vLLM's scheduler: room for prefills, pulls, moves, load."""
