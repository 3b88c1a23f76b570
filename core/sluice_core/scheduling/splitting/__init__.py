"""Requests in parts: where DynaServe cuts them, and what its engines batch (arXiv:2504.09285)."""
