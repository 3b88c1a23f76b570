"""Text in, token ids out, and back: everything of a request that is text stays in the router."""
