"""How long handed-off KV waits for its reader."""

# In seconds. Nothing extends it, so that a reader that is gone cannot keep another engine's blocks.
KV_LEASE_S = 30
