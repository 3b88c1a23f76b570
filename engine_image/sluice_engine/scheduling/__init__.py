"""Hooks of vLLM's scheduler: room for prefills, grants, moves, load."""
