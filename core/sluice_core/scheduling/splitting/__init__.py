"""Requests in parts: where DynaServe cuts them (arXiv:2504.09285)."""
