"""Requests that move from one engine to another, and KV that is copied before."""
