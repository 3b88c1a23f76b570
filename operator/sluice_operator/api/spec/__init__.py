"""The fields of a ServingCluster's spec, one module per section."""
