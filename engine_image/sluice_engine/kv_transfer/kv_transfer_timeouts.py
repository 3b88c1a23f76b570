"""How long handed-off KV waits for its reader, how long a pull waits for room, and how long a read may take."""

# In seconds. Nothing extends it, so that a reader that is gone cannot keep another engine's blocks.
KV_LEASE_S = 30
# A read of a part that took longer is void: its source may have ended the lease and filled the blocks anew.
LONGEST_READ_S = KV_LEASE_S / 2
# A pull that has not started by then is cancelled: recomputing is quicker than waiting for blocks on an engine without
# room.
PULL_START_S = 2.0
