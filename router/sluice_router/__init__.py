"""The data plane: OpenAI-compatible HTTP and gRPC in front, engine streams behind, placement and moves between.

``router`` holds the entry points, ``state`` the one class that owns mutable state, ``requests`` the seam to the client edge.
"""
