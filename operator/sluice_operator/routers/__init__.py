"""Connections to the routers: pushes plans, and sums up what routers report."""
