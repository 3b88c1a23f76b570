"""How an engine starts: vLLM's configuration, checks, identity, warm-up."""
