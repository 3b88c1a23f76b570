"""The policies that decide: placement, batching, decode flow."""
