"""The Kubernetes objects of a ServingCluster, and how they are applied."""
