"""Simulated clusters as flags and manifests describe them, and the processes that run them."""
