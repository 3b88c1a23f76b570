"""The plan: roles of engines, scale-down, and the ConfigMap that stores it."""
