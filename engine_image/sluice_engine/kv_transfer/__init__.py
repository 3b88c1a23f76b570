"""KV transfer between engines: the NIXL connector, handles, hand-off, resume."""
