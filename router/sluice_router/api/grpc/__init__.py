"""The gRPC API for clients."""
