"""KV transfer between engines: the NIXL connector, handles, grants, hand-off, replay of earlier output."""
