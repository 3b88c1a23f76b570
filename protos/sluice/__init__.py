"""Root of the wire package."""
