"""``sluice demo``: a scenario on a running cluster, and what it measured."""
