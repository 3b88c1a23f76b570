"""The fields of a ServingCluster's spec and their defaults, one module per section."""
