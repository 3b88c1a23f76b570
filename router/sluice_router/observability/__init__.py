"""Metrics, and the log of decisions behind `sluice explain`."""
