"""Requests that clients may go on with at another router."""
