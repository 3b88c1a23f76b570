"""Limits of owners of API keys, over all routers together."""
