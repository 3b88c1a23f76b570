"""Connections to the engines: discovery, and one gRPC stream to each."""
