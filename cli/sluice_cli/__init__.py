"""The ``sluice`` command: a launcher of local clusters, and questions to running ones."""
