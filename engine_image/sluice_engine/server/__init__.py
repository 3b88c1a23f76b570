"""The gRPC server of an engine: one stream per router, one message per iteration."""
