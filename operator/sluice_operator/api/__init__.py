"""The ServingCluster: its fields, their validation, sliders, conditions and names."""
