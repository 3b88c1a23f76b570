"""The data plane: HTTP and gRPC for clients, streams to engines, placement and migration between them.

``server`` composes it. ``api`` takes requests, ``scheduling`` decides where they run, ``engines`` carries messages.
"""
