"""A cluster of local processes that follows its manifest (``sluice up``)."""
