"""Requests that move between simulated engines: hand-offs, waits for a grant, prompts that two engines compute."""
