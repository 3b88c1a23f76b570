"""The HTTP and gRPC edges: what clients and the control plane call."""
